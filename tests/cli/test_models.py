"""``jaxinfer pull``, ``list`` and ``rm``, and commands that answer from a model of the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli.main import cli
from jaxinfer.weights import catalog, inventory
from jaxinfer.weights.uses import made_for, note_use, uses
from kit.hub import Hub, running_hub, use_hub
from kit.raw_http import post
from kit.server_process import SERVE, ServerProcess

GGUF = "m-Q4_0.gguf"


@pytest.fixture
def hub(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """A hub with the tiny model, which this process and those that it starts use."""
    from huggingface_hub.utils import close_session

    with running_hub() as hub:
        use_hub(hub, tmp_path / "home", monkeypatch)
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "default-cache"))
        hub.add("org/tiny", model_folder)
        hub.add("org/quants", {GGUF: os.urandom(3_000_000), "m-Q8_0.gguf": os.urandom(5_000_000)})
        yield hub
        close_session()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_pull_list_and_rm(hub: Hub, tmp_path: Path) -> None:
    cache = f"--cache-dir={tmp_path / 'cache'}"
    [pulled] = lines(run("pull", "org/quants:q4_0", cache))
    assert pulled.startswith("org/quants:q4_0 is here: ") and ".gguf, 3 MB, after " in pulled
    lines(run("pull", "org/quants:Q8_0", cache))
    lines(run("pull", "org/tiny", cache))
    (tmp_path / "cache" / "executables" / "abc").mkdir(parents=True)
    (tmp_path / "cache" / "executables" / "abc" / "step").write_bytes(bytes(2000))
    q4 = next((tmp_path / "home").rglob(GGUF)).resolve()
    note_use(tmp_path / "cache", (q4,), tmp_path / "cache" / "executables" / "abc")

    listed = lines(run("list", cache))
    assert "org/quants:Q4_0 3 MB executables 2 kB" in listed
    assert "org/quants:Q8_0 5 MB" in listed
    assert any(line.startswith("org/tiny ") for line in listed)
    assert any(line.startswith("qwen3-1.7b 1.83 GB calls tools") for line in listed)

    [removed] = lines(run("rm", "org/quants:Q4_0", cache))
    assert removed == "removed org/quants:Q4_0, 3 MB, and 2 kB that was made for it"
    assert not (tmp_path / "cache" / "executables" / "abc").exists()
    assert "org/quants:Q8_0 5 MB" in lines(run("list", cache))
    assert lines(run("rm", "org/quants", cache)) == ["removed org/quants, 5 MB"]
    assert not list((tmp_path / "home").glob("hub/*quants*"))
    names = ("org/quants", "org/tiny:Q4_0", "smollm2-135m-instruct", "gpt2", str(tmp_path))
    for gone in (*names, "m" * 300):
        result = run("rm", gone, cache)
        assert result.exit_code == 1 and result.stderr.count("\n") == 1, gone


def test_an_incomplete_model_is_listed_and_removed(hub: Hub, tmp_path: Path) -> None:
    run("pull", "org/tiny")
    [weights] = (tmp_path / "home").rglob("*.safetensors")
    blob = weights.resolve()
    weights.unlink()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    [line] = [line for line in lines(run("list")) if line.startswith("org/tiny")]
    assert line.endswith(" incomplete: pull it again")
    assert lines(run("rm", "org/tiny"))[0].startswith("removed org/tiny, ")
    assert not list((tmp_path / "home").glob("hub/models--*"))


def test_files_of_one_quantisation(hub: Hub) -> None:
    """They have the names of the whole repository, also while one of them is here."""
    hub.add("org/two", {f"{name}-Q6_K.gguf": os.urandom(2_000_000) for name in "ab"})
    lines(run("pull", "org/two:a-q6_k"))
    assert "org/two:a-Q6_K 2 MB" in lines(run("list"))
    lines(run("pull", "org/two:b-Q6_K"))
    assert lines(run("rm", "org/two:a-Q6_K")) == ["removed org/two:a-Q6_K, 2 MB"]
    assert "org/two:b-Q6_K 2 MB" in lines(run("list"))


def test_a_short_name_of_a_hub_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxinfer.weights import locate

    entry = catalog.CatalogEntry("org/quants:Q4_0", size=3_000_000, about="tests")
    for module in (locate, inventory):
        monkeypatch.setattr(module, "find_model", {"small": entry}.get)
    monkeypatch.setattr(inventory, "known_models", lambda: ("small",))
    assert lines(run("pull", "small"))[0].startswith("small is here: ")
    listed = lines(run("list"))
    assert "org/quants:Q4_0 = small 3 MB" in listed, listed
    assert lines(run("rm", "small")) == ["removed small, 3 MB"]


def test_executables_that_another_model_uses_are_kept(tmp_path: Path) -> None:
    shared, own = tmp_path / "executables" / "shared", tmp_path / "converted" / "own"
    first, second = (Path("/a"), Path("/b")), (Path("/c"),)
    for files, made in ((first, shared), (second, shared), (first, own), (first, own)):
        note_use(tmp_path, files, made)
    records, folders = made_for([Path("/b")], uses(tmp_path))
    assert len(records) == 1 and folders == {own}
    assert made_for([Path("/x")], uses(tmp_path)) == ((), set())
    (records[0].record).write_text("file /b\nmade ../outside\n")
    assert made_for([Path("/b")], uses(tmp_path))[1] == set()


def test_commands_answer_from_a_model_of_the_hub(
    hub: Hub, tiny_arguments: list[str], tmp_path: Path
) -> None:
    """generate, LLM, serve and the others fetch the model once, and later make no request."""
    own = [one for one in tiny_arguments if not one.startswith("--model")]
    result = run("generate", "--model=org/tiny", *own, "--max-tokens=4", "--ignore-eos", "hello")
    assert result.exit_code == 0 and result.stdout.strip(), result.output
    requests, served = len(hub.requests), hub.served
    assert served == len(hub.repos["org/tiny"].files["model.safetensors"])
    settings = dict(one.removeprefix("--").split("=") for one in own)
    sizes = {name.replace("-", "_"): int(size) for name, size in settings.items() if size.isdigit()}
    llm = LLM("org/tiny", cache_dir=settings["cache-dir"], **sizes)
    [answer] = llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 4
    assert run("inspect", "org/tiny", "--json", *own).exit_code == 0
    assert run("export", "org/tiny", str(tmp_path / "exported"), own[0]).exit_code == 0
    command = ["convert", "org/tiny", "--quantization=int8", "-o", str(tmp_path / "int8")]
    assert run(*command).exit_code == 0
    assert (tmp_path / "int8" / "tokenizer.json").is_file()
    server = ServerProcess([*SERVE, "org/tiny", *own, "--host=127.0.0.1", "--port=0"])
    try:
        server.wait_ready()
        body = {"model": "org/tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        reply = post(server.port, "/v1/completions", **body)
        assert json.loads(reply.body)["usage"]["completion_tokens"] == 4
    finally:
        server.close()
    assert len(hub.requests) == requests
