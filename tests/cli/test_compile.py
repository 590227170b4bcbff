"""Bundles on the command line: written whole, used instead of compiling, refused if different."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli.main import cli
from jaxinfer.core.errors import CacheError, ConfigError
from jaxinfer.engine.api.llm import LLM
from jaxinfer.exec.compile import build as exec_compile
from jaxinfer.exec.compile import bundle as bundles
from jaxinfer.exec.compile.bundle import tuned_choices
from jaxinfer.exec.compile.program import Program
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.safetensors_files import SafetensorsCheckpoint

SIZES = ("--max-num-seqs=1", "--max-num-batched-tokens=64", "--max-model-len=128")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False)


def no_weights(self: SafetensorsCheckpoint, name: str) -> None:
    raise AssertionError(f"{name} was read")


@pytest.fixture(scope="module", autouse=True)
def no_flags_of_xla() -> Iterator[None]:
    """Remove XLA's flags, which a bundle records and ``make test`` sets.

    Other tests need them, so XLA reads them before.
    """
    jax.jit(lambda: 0).lower().compile()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        yield


@pytest.fixture(scope="module")
def bundle(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of five executables, made without reading weights."""
    folder = tmp_path_factory.mktemp("compiled") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "read", no_weights)
        result = run("compile", model_folder, *SIZES, "--page-size=8", "--output", folder)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"{folder} holds 5 executables, ")
    assert "(17 pages)" in result.stdout
    assert [path.name for path in folder.parent.iterdir()] == ["bundle"]
    return folder


@pytest.fixture
def edited(bundle: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """A bundle with the same files and another manifest."""

    def edit(change: Callable[[dict[str, Any]], object]) -> Path:
        folder = tmp_path / "edited"
        folder.mkdir()
        for path in bundle.iterdir():
            (folder / path.name).hardlink_to(path)
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return edit


def test_generate_from_a_bundle(bundle: Path, model_folder: Path, tmp_path: Path) -> None:
    """No flag is repeated, nothing is compiled, and the answer equals the same engine's."""
    arguments = ("generate", "-m", model_folder, "--json", "--temperature=0", "--max-tokens=9")
    cache = f"--cache-dir={tmp_path}"
    packed = run(*arguments, f"--bundle={bundle}", cache, "--stats", "hello")
    assert packed.exit_code == 0, packed.stderr
    assert "0 executables compiled, 5 from the cache" in packed.stderr
    assert list(tmp_path.iterdir()) == []
    plain = run(*arguments, *SIZES, cache, "hello")
    assert json.loads(packed.stdout) == json.loads(plain.stdout)


START = """
import sys
from jaxinfer import LLM, SamplingParams

llm = LLM(sys.argv[1], bundle=sys.argv[2], load_format="dummy", skip_tokenizer_init=True)
llm.generate([[5, 6]], SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
print(*sys.modules)
"""


def test_a_bundle_is_run_without_importing_flax(bundle: Path, model_folder: Path) -> None:
    """Flax, Jinja, tokenizers and gguf took 0.17 of 0.79 s of imports."""
    command = (sys.executable, "-c", START, model_folder, bundle)
    modules = subprocess.check_output(command, text=True).split()
    assert "jax" in modules
    assert not {"flax", "jinja2", "tokenizers", "gguf"} & {*modules}


def test_settings_come_from_the_bundle(bundle: Path, model_folder: Path) -> None:
    llm = LLM(str(model_folder), bundle=bundle, max_num_seqs=1, enable_prefix_caching=False)
    limits = llm._engine.limits
    assert (limits.page_size, limits.max_model_len, limits.num_pages) == (8, 128, (17,))
    assert not limits.enable_prefix_caching


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 2}, "max_num_seqs is 1 in the bundle .* and 2 was asked for"),
        ({"block_size": 16}, "page_size is 8 in the bundle .* and 16 was asked for"),
        ({"dtype": "bfloat16"}, "dtype is float32 in the bundle .* and bfloat16 was asked for"),
        ({"kernels": "kv_append=xla"}, "kernels is not set in the bundle .* and kv_append=xla was"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is not set in the bundle"),
    ],
)
def test_contradicting_settings(
    bundle: Path, model_folder: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(model_folder), bundle=bundle, **settings)


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        ("machine", "jax", "jax is 0.0.1 in the bundle and [0-9.]+ here"),
        ("machine", "device", "device is 0.0.1 in the bundle and cpu cpu here"),
        ("machine", "sources", "sources is 0.0.1 in the bundle and [0-9a-f]+... here"),
        ("machine", "XLA_FLAGS", "XLA_FLAGS is 0.0.1 in the bundle and not set here"),
        ("model", "hidden_size", "hidden_size is 0.0.1 in the bundle and 64 here"),
        ("kernels", "kernel sample", "kernel sample is 0.0.1 in the bundle and not set here"),
        ("limits", "buckets", "buckets is 0.0.1 in the bundle and d1 p64x1 here"),
    ],
)
def test_misfit(
    part: str,
    field: str,
    message: str,
    edited: Callable[..., Path],
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error has both values; no weights are read and nothing is compiled instead."""
    monkeypatch.setattr(SafetensorsCheckpoint, "read", no_weights)
    monkeypatch.delattr(exec_compile, "compile_all")
    folder = edited(lambda manifest: manifest["fingerprint"][part].update({field: "0.0.1"}))
    with pytest.raises(CacheError, match=f"bundle .* does not fit: {message}; compile another"):
        LLM(str(model_folder), bundle=folder)


def test_executable_missing_in_the_manifest(
    edited: Callable[..., Path], model_folder: Path
) -> None:
    folder = edited(lambda manifest: manifest["executables"].pop("d1"))
    with pytest.raises(CacheError, match="its manifest has no d1"):
        LLM(str(model_folder), bundle=folder)


def test_format(edited: Callable[..., Path], model_folder: Path) -> None:
    folder = edited(lambda manifest: manifest.update(format=0))
    with pytest.raises(CacheError, match="format is 0 in the bundle and 4 here"):
        LLM(str(model_folder), bundle=folder)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "manifest", "nothing"])
def test_damage(damage: str, edited: Callable[..., Path], model_folder: Path) -> None:
    folder = edited(lambda manifest: None)
    executable = folder / "d1.bin"
    payload = executable.read_bytes()
    executable.unlink()
    match damage:
        case "cut":
            executable.write_bytes(payload[:-1])
            message = f"d1.bin has {len(payload) - 1} of {len(payload)} bytes"
        case "flipped":
            executable.write_bytes(payload[:-1] + bytes([payload[-1] ^ 1]))
            message = "d1.bin is not what its manifest says"
        case "missing":
            message = "d1.bin is missing"
        case "manifest":
            (folder / "manifest.json").write_text("{}")
            message = "manifest.json is no manifest"
        case _:
            folder = folder / "elsewhere"
            message = "there is no bundle .*elsewhere"
    with pytest.raises(CacheError, match=f"{message}.*; .*compile"):
        LLM(str(model_folder), bundle=folder)


def test_the_folder_may_hold_the_same_bundle(bundle: Path, model_folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in bundle.iterdir()}
    result = run("compile", model_folder, *SIZES, "--page-size=8", "-o", bundle)
    assert result.exit_code == 0
    assert "held already" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in bundle.iterdir()} == before


def test_more_pages_than_can_be_used_are_the_same_plan(bundle: Path, model_folder: Path) -> None:
    llm = LLM(str(model_folder), bundle=bundle, num_pages=1000)
    assert llm.stats().num_compiled == 0
    with pytest.raises(CacheError, match="num_pages is 17 in the bundle and 9 here"):
        LLM(str(model_folder), bundle=bundle, num_pages=9)


def test_the_folder_holds_another_bundle(bundle: Path, model_folder: Path) -> None:
    result = run("compile", model_folder, *SIZES, "-o", bundle)
    assert result.exit_code == 1
    assert "exists already and is no such bundle" in result.stderr
    assert "num_pages is 17 in the bundle and 9 here" in result.stderr


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_folder_holds_something_else(kind: str, model_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
    result = run("compile", model_folder, *SIZES, "-o", output)
    assert result.exit_code == 1
    assert result.stderr == (
        f"jaxinfer: error: {output} exists already and is no bundle; choose another folder\n"
    )
    assert list(tmp_path.iterdir()) == [output]


def test_a_tuned_file_with_an_unknown_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, output = tmp_path / "cpu.json", tmp_path / "bundle"
    file.write_text('{"qwen9_4b": {}}')
    monkeypatch.setattr("pallas_kernels.harness.tuned.tuned_file", lambda *_: file)
    result = run("compile", tmp_path / "no_model", *SIZES, "-o", output)  # not looked for yet
    assert result.exit_code == 1
    assert result.stderr == (
        f"jaxinfer: error: {file} cannot be used: tuned choices name 'qwen9_4b', which is not a "
        "case; "
        "tune all_gather again\n"
    )
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (ConfigError("no"), 1)], ids=["ctrl-c", "error"]
)
def test_nothing_half_written_is_left(
    error: BaseException,
    code: int,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        (partial,) = tmp_path.glob("*.partial")
        (partial / "half").write_text("")
        raise error

    monkeypatch.setattr(exec_compile, "write_manifest", fail)
    monkeypatch.setattr(exec_compile, "compile_all", lambda *_: {})
    result = run("compile", model_folder, *SIZES, "-o", tmp_path / "bundle")
    assert result.exit_code == code
    assert list(tmp_path.iterdir()) == []


def test_inspect(bundle: Path, edited: Callable[..., Path]) -> None:
    report = json.loads(run("inspect", "--json", "--bundle", bundle).stdout)
    assert report["fits"] and all(field["fits"] for field in report["machine"].values())
    assert report["limits"]["max_model_len"] == 128
    assert report["memory"]["kv_bytes"] == 17 * 8 * 2 * 2 * 2 * 16 * 4
    assert report["tuned"] == tuned_choices(default_placement())
    assert report["executables"].keys() == {"admit", "extras1", "score64", "d1", "p64x1"}

    def other_jax(manifest: dict[str, Any]) -> None:
        manifest["fingerprint"]["machine"]["jax"] = "0.0.1"
        manifest["tuned"] = {"append_decode": {"qwen": {"splits": 4}}}

    other = edited(other_jax)
    lines = run("inspect", "--bundle", other).stdout.splitlines()
    assert max(map(len, lines)) < 1500
    assert any(line.startswith("jax              0.0.1, but ") for line in lines)
    assert "append_decode    tuned for qwen" in lines
    assert lines[-1].startswith("fits             no")


def test_a_bundle_needs_no_flag(bundle: Path, model_folder: Path) -> None:
    by_name, by_flag = (run("inspect", "--json", *way, bundle) for way in ((), ("--bundle",)))
    assert by_name.exit_code == 0 and by_name.stdout == by_flag.stdout
    assert run("inspect", "--json", "--model", bundle).stdout == by_flag.stdout
    assert run("inspect", bundle, "--dtype=float32").exit_code == 2
    assert run("inspect", bundle, "--model", model_folder).exit_code == 2
    named = run("generate", "--model", bundle, "x")
    assert named.exit_code == 1
    assert "is a bundle of executables, without weights; name its model" in named.stderr


def test_executables_of_the_cache_are_taken(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from engines with other buckets; what is missing or damaged is compiled."""
    cache = f"--cache-dir={tmp_path / 'cache'}"
    pages = ("--num-pages=9", "--max-num-seqs=1", "--max-model-len=128")
    sizes = (*pages, "--max-num-batched-tokens=64")
    few = (*pages, "--max-num-batched-tokens=32", "--prefill-bucket-start=32")
    generate = ("generate", "-m", model_folder, cache, "--max-tokens=1", *few, "--n=2", "x")
    assert run(*generate).exit_code == 0
    compiled: list[list[str]] = []
    compile_all = exec_compile.compile_all

    def counted(program: Program, names: list[str], *arguments: Any) -> Any:
        compiled.append([*names])
        return compile_all(program, names, *arguments)

    monkeypatch.setattr(exec_compile, "compile_all", counted)
    first = run("compile", model_folder, cache, *sizes, "-o", tmp_path / "first")
    assert compiled == [["score64", "p64x1"]]
    assert "take 3 executables (admit, extras1, d1) from " in first.stderr
    whole = run("compile", model_folder, cache, *few, "-o", tmp_path / "whole")
    assert whole.exit_code == 0 and len(compiled) == 1
    answer = run(*generate[:-4], f"--bundle={tmp_path / 'first'}", "x")
    assert answer.exit_code == 0, answer.stderr
    [cached] = (tmp_path / "cache" / "executables").glob("*/d1.bin")
    cached.write_bytes(b"")
    damaged = run("compile", model_folder, cache, *few, "-o", tmp_path / "again")
    assert compiled[1:] == [["d1"]]
    assert "not taken from the cache: " in damaged.stderr and "d1.bin" in damaged.stderr


def test_tuned_choices_of_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {"pallas_kernels/append_decode/tuned/cpu.json": {"qwen": {"splits": 4}}}
    monkeypatch.setattr(
        bundles, "read_choices", lambda file: tuned.get("/".join(Path(str(file)).parts[-4:]), {})
    )
    assert tuned_choices(default_placement()) == {"append_decode": {"qwen": {"splits": 4}}}


@pytest.mark.parametrize("arguments", [[], ["m", "--bundle=b"], ["--bundle=b", "--dtype=float32"]])
def test_inspect_needs_a_model_or_a_bundle(arguments: list[str]) -> None:
    assert run("inspect", *arguments).exit_code == 2
