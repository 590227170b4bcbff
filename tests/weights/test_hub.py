"""Models of the hub, fetched from a stand-in on loopback by the real huggingface-hub."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError, JaxinferError, SourceError
from jaxinfer.core.progress import NO_PROGRESS, NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.weights.hub.files import files_of, gguf_files, small_files
from jaxinfer.weights.hub.names import HubName, parse_name
from jaxinfer.weights.locate import Places, locate
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf, write_hf_folder
from kit.hub import TOKEN, Hub, Repo, running_hub, use_hub
from kit.tokenizers import tiny_tokenizer_json

HTML = b"<!DOCTYPE html><html><body>Sign in to the network</body></html>"
PAGE = (200, {"Content-Type": "text/html"}, HTML)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    """A hub that this process uses, with one model: two shards and much that is not needed."""
    from huggingface_hub.utils import close_session

    with running_hub() as hub:
        use_hub(hub, tmp_path / "home", monkeypatch)
        hub.add("org/tiny", model_files(tmp_path))
        yield hub
        close_session()


def model_files(tmp_path: Path) -> dict[str, bytes]:
    config = tiny_llama_config(vocab_size=320)
    tensors = random_hf_tensors(build_model(config, "float32"))
    folder = write_hf_folder(tmp_path / "made", config, tensors, shards=2)
    return {
        **{path.name: path.read_bytes() for path in folder.iterdir()},
        "generation_config.json": b'{"top_k": 7}',
        "tokenizer.json": tiny_tokenizer_json().encode(),
        "tokenizer_config.json": b'{"chat_template": "config"}',
        "additional_chat_templates/tool_use.jinja": b"tools",
        "chat_template.jinja": b"jinja",
        "README.md": b"# Tiny",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"of another layout",
        "original/model.safetensors": b"of another layout",
        "onnx/model.onnx": b"onnx",
    }


def resolve(reference: str, tmp_path: Path, **options: Any) -> ModelSource:
    options = {"cache_dir": tmp_path / "cache", "progress": NO_PROGRESS} | options
    return resolve_source(reference, **options)


def fetched_names(tmp_path: Path) -> set[str]:
    [snapshot] = (tmp_path / "home" / "hub").glob("models--*/snapshots/*")
    return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}


def big_repo(hub: Hub, num_bytes: int = 1 << 20) -> Repo:
    """A repository with one large file, which is a GGUF file by name alone."""
    return hub.add("org/big", {"big-Q4_0.gguf": os.urandom(num_bytes)})


def fetch(reference: str, tmp_path: Path, **options: Any) -> Path:
    return locate(reference, Places(tmp_path / "cache"), NO_PROGRESS, **options).path


# Names and files


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/Name-1.5B_x:q4_k_m", HubName("org/Name-1.5B_x", None, "q4_k_m")),
        ("org/name@main:Q8_0", HubName("org/name", "main", "Q8_0")),
        ("name", None),
        ("org/name/file.gguf", None),
        ("./org/name", None),
        ("folder/model.gguf", None),
        ("org/name:", None),
        ("org/name@", None),
        ("org/na--me", None),
        ("org/" + "n" * 96, None),
    ],
)
def test_names(reference: str, name: HubName | None) -> None:
    assert parse_name(reference) == name
    assert name is None or str(name) == reference


def test_a_revision_is_given_once(tmp_path: Path) -> None:
    assert parse_name("org/name", "v1") == parse_name("org/name@v1", "v1")
    assert parse_name("org/name", "") == parse_name("org/name")
    assert parse_name("org/name@v1", "") == parse_name("org/name@v1")
    with pytest.raises(ConfigError, match="names revision v2, and the setting revision is 'v1'"):
        parse_name("org/name@v2", "v1")
    with pytest.raises(ConfigError, match="revision 'v1' is that of a model of the hub, and"):
        resolve(str(tmp_path), tmp_path, revision="v1")


def test_gguf_files_by_quantisation() -> None:
    names = [
        "Qwen2.5-7B-Q4_K_M.gguf",
        "qwen2.5-7b-iq2_xs.gguf",
        "UD/Qwen-UD-Q4_K_XL.gguf",
        "Qwen2.5-7B.BF16.gguf",
        "model.gguf",
        "q8/m-q8_0-00001-of-00002.gguf",
        "q8/m-q8_0-00002-of-00002.gguf",
        "gpt-oss-mxfp4.gguf",
        "mmproj-F16.gguf",
        "Qwen2.5-7B.mmproj-Q8_0.gguf",
        "Qwen-imatrix.gguf",
        "Q3_K_S/part-00001-of-00002.gguf",
        "Q3_K_S/part-00002-of-00002.gguf",
        "nvfp4/part.gguf",
        "a-Q6_K.gguf",
        "draft-Q6_K.gguf",
        "README.md",
    ]
    assert gguf_files(names) == {
        "BF16": ("Qwen2.5-7B.BF16.gguf",),
        "Q4_K_M": ("Qwen2.5-7B-Q4_K_M.gguf",),
        "UD-Q4_K_XL": ("UD/Qwen-UD-Q4_K_XL.gguf",),
        "MXFP4": ("gpt-oss-mxfp4.gguf",),
        "model": ("model.gguf",),
        "Q8_0": ("q8/m-q8_0-00001-of-00002.gguf", "q8/m-q8_0-00002-of-00002.gguf"),
        "IQ2_XS": ("qwen2.5-7b-iq2_xs.gguf",),
        "Q3_K_S": ("Q3_K_S/part-00001-of-00002.gguf", "Q3_K_S/part-00002-of-00002.gguf"),
        "NVFP4": ("nvfp4/part.gguf",),
        "a-Q6_K": ("a-Q6_K.gguf",),
        "draft-Q6_K": ("draft-Q6_K.gguf",),
    }


@pytest.mark.parametrize(
    ("given", "found"),
    [("q4_k_m", 1), ("UD-Q4_K_XL", 2), ("q4_k_xl", 2), ("A-Q6_K", 3), ("Q6_K", None), ("K", None)],
)
def test_the_end_of_a_quantisation_names_the_only_one(given: str, found: int | None) -> None:
    names = {"Q4_K_M": 1, "UD-Q4_K_XL": 2, "a-Q6_K": 3, "b-Q6_K": 4, "UD-Q4_K_M": 5}
    assert files_of(given, names) == found


def test_small_files_of_an_embedding_model() -> None:
    names = ["modules.json", "1_Pooling/config.json", "vocab.txt", "x/config.json", "config.json"]
    assert small_files(names) == ("modules.json", "1_Pooling/config.json", "config.json")
    assert small_files(names, tokenizer_only=True) == ()


def test_older_vocabularies_are_fetched_where_there_is_no_tokenizer_json() -> None:
    names = ["tiktoken.model", "tokenizer_config.json", "original/tokenizer.model"]
    assert small_files(names) == ("tiktoken.model", "tokenizer_config.json")
    assert small_files([*names, "tokenizer.json"]) == ("tokenizer_config.json", "tokenizer.json")


# Fetching


def test_only_needed_files_are_fetched_and_no_request_is_made_again(
    hub: Hub, tmp_path: Path
) -> None:
    source = resolve("org/tiny", tmp_path)
    assert (source.name, source.generation_config) == ("tiny", {"top_k": 7})
    spec = source.tokenizer_spec()
    assert spec.chat_template == "jinja" and load_tokenizer(spec)
    assert spec.additional_chat_templates == {"tool_use": "tools"}
    shards = {f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)}
    assert fetched_names(tmp_path) == shards | {
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        "additional_chat_templates/tool_use.jinja",
    }
    assert hub.served == sum(len(hub.repos["org/tiny"].files[name]) for name in shards)
    assert {path.parent.name for path in source.files} == {"blobs"}
    requests = len(hub.requests)
    assert resolve("org/tiny", tmp_path).fingerprint == source.fingerprint
    assert len(hub.requests) == requests
    fetch("org/tiny", tmp_path, refresh=True)  # ``pull`` asks for a newer commit
    assert [one.method for one in hub.requests[requests:] if one.host == "files"] == []
    assert len(hub.requests) > requests


def test_a_pull_takes_a_newer_commit_and_keeps_files_that_did_not_change(
    hub: Hub, tmp_path: Path
) -> None:
    first = fetch("org/tiny", tmp_path)
    served = hub.served
    hub.repos["org/tiny"].files["generation_config.json"] = b'{"top_k": 8}'
    assert fetch("org/tiny", tmp_path) == first
    second = fetch("org/tiny", tmp_path, refresh=True)
    assert (second / "generation_config.json").read_text() == '{"top_k": 8}'
    assert fetch("org/tiny", tmp_path) == second
    assert hub.served == served


def test_revisions_and_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repo = hub.repos["org/tiny"]
    repo.branches = ("main", "v1", "refs/pr/1")
    places = [fetch(f"org/tiny@{revision}", tmp_path) for revision in (*repo.branches, repo.commit)]
    assert len({*places}) == 1
    source = resolve("org/tiny", tmp_path, revision="v1")
    assert source.name == "tiny"
    requests = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/tiny@v1", tmp_path) == places[0]
    # fetched by a program that keeps no list of the repository's files
    shutil.rmtree(places[0].parents[1] / "trees")
    from huggingface_hub import _tree_cache

    monkeypatch.setattr(_tree_cache, "_IN_MEMORY_TREE_CACHE", {})
    assert fetch("org/tiny", tmp_path) == places[0]
    assert len(hub.requests) == requests


def test_a_running_engine_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nothing is fetched here; run `jaxinfer pull org/tiny`"):
        resolve("org/tiny", tmp_path, offline=True)
    assert hub.requests == []
    first = resolve("org/tiny", tmp_path)
    assert resolve("org/tiny", tmp_path, offline=True).fingerprint == first.fingerprint


def test_random_weights_and_tokenizers_need_no_weights(hub: Hub, tmp_path: Path) -> None:
    assert resolve("org/tiny", tmp_path, load_format="dummy").checkpoint is None
    folder = write_hf_folder(tmp_path / "local", tiny_llama_config())
    options = {"load_format": "dummy", "tokenizer": "org/tiny@main"}
    spec = resolve(str(folder), tmp_path, **options).tokenizer_spec()
    assert spec.tokenizer_json == tiny_tokenizer_json()
    assert hub.served == 0


def test_a_local_folder_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf_folder(tmp_path / "org" / "tiny", tiny_llama_config(vocab_size=64))
    monkeypatch.chdir(tmp_path)
    source = resolve("org/tiny", tmp_path, load_format="dummy")
    assert source.hf_config["vocab_size"] == 64
    assert hub.requests == []


def test_gguf_files(hub: Hub, tmp_path: Path) -> None:
    config = tiny_llama_config()
    made = write_gguf(
        tmp_path / "tiny.gguf", config, random_hf_tensors(build_model(config, "float32"))
    )
    content = made.read_bytes()
    files = {"Tiny-F32.gguf": content, "Tiny-Q4_0.gguf": b"other", "config.json": b"{}"}
    hub.add("org/tiny-GGUF", files, gguf={"architecture": "llama"})
    source = resolve("org/tiny-GGUF:f32", tmp_path)
    assert source.name == "Tiny-F32"
    assert fetched_names(tmp_path) == {"Tiny-F32.gguf"}
    assert hub.served == len(content)
    requests = len(hub.requests)
    assert resolve("org/tiny-GGUF@main:F32", tmp_path).fingerprint == source.fingerprint
    assert len(hub.requests) == requests


def test_a_gguf_file_in_parts(hub: Hub, tmp_path: Path) -> None:
    config = tiny_llama_config()
    tensors = random_hf_tensors(build_model(config, "float32"))
    part = write_gguf(tmp_path / "tiny-F32.gguf", config, tensors, part_tensors=9)
    files = {f"F32/{one.name}": one.read_bytes() for one in part.parent.glob("tiny-F32-*.gguf")}
    hub.add("org/tiny-GGUF", {**files, "other-Q4_0.gguf": b"other"}, gguf={"architecture": "llama"})
    source = resolve("org/tiny-GGUF:F32", tmp_path)
    assert source.name == "tiny-F32"
    assert len(source.files) == len(files) > 1
    assert hub.served == sum(map(len, files.values()))
    requests = len(hub.requests)
    assert resolve("org/tiny-GGUF:F32", tmp_path).fingerprint == source.fingerprint
    assert len(hub.requests) == requests


def test_a_token_goes_to_the_hub_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/tiny"].gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    resolve("org/tiny", tmp_path)
    sent = {(one.host, one.headers.get("authorization")) for one in hub.requests}
    assert sent == {("hub", f"Bearer {TOKEN}"), ("files", None)}


def test_another_folder(hub: Hub, tmp_path: Path) -> None:
    resolve("org/tiny", tmp_path, download_dir=str(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "models--org--tiny").is_dir()
    assert not (tmp_path / "home" / "hub").exists()


class Watched(NoProgress):
    """Counts bytes of each task."""

    def __init__(self) -> None:
        self.done: dict[str, float] = {}
        self.totals: dict[str, float | None] = {}
        self.notes: list[str] = []

    @contextmanager
    def task(self, description: str, total: float | None, unit: str = "") -> Iterator[Any]:
        self.totals[description] = total

        def advance(amount: float) -> None:
            self.done[description] = self.done.get(description, 0) + amount

        yield advance

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_progress_counts_the_bytes_that_are_missing(hub: Hub, tmp_path: Path) -> None:
    data, watched = big_repo(hub).files["big-Q4_0.gguf"], Watched()
    partial = tmp_path / "home/hub/models--org--big/blobs" / hashlib.sha256(data).hexdigest()
    partial.parent.mkdir(parents=True)
    partial.with_name(f"{partial.name}.incomplete").write_bytes(data[: len(data) // 2])
    locate("org/big:Q4_0", Places(tmp_path), watched)
    [(task, done)] = watched.done.items()
    assert task == "download org/big:Q4_0" and watched.totals[task] == done < len(data)
    assert len(watched.notes) == 1 and "of 1.0 MB of org/big:Q4_0 are here" in watched.notes[0]


# Broken and concurrent transfers

PULL = """
import sys
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1 << 14
from jaxinfer.cli.main import main
sys.argv = ["jaxinfer", "pull", *sys.argv[1:]]
main()
"""


def start_pull(hub: Hub, reference: str, tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    environment["JAXINFER_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", PULL, reference]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **streams)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_pull_goes_on(hub: Hub, tmp_path: Path) -> None:
    data = big_repo(hub, 4 << 20).files["big-Q4_0.gguf"]
    hub.stall_after = len(data) // 2
    process = start_pull(hub, "org/big:Q4_0", tmp_path)
    partial = tmp_path / f"home/hub/models--org--big/blobs/{hashlib.sha256(data).hexdigest()}"
    partial = partial.with_name(partial.name + ".incomplete")
    wait_until(lambda: partial.exists() and partial.stat().st_size > len(data) // 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    here, hub.stall_after, served = partial.stat().st_size, None, hub.served
    assert fetch("org/big:Q4_0", tmp_path).read_bytes() == data
    assert hub.requests[-1].host == "hub"  # the link, after the file
    [again] = [one for one in hub.requests if one.host == "files" and "range" in one.headers]
    assert again.headers["range"] == f"bytes={here}-"
    assert hub.served - served == again.served == len(data) - here < 2 * len(data) // 3
    assert not partial.exists()


def test_two_pulls_at_once_fetch_once(hub: Hub, tmp_path: Path) -> None:
    data = big_repo(hub).files["big-Q4_0.gguf"]
    hub.stall_after = len(data) // 2
    processes = [start_pull(hub, "org/big:Q4_0", tmp_path) for _ in range(2)]
    asked = "/api/models/org/big/revision/main?blobs=True"
    wait_until(lambda: sum(one.path.lower() == asked.lower() for one in hub.requests) == 2)
    time.sleep(0.3)  # the second waits for the lock
    hub.go.set()
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and "org/big:Q4_0 is here: " in out, err
    assert hub.served == len(data)


def test_a_connection_that_is_reset_goes_on(hub: Hub, tmp_path: Path) -> None:
    data = big_repo(hub).files["big-Q4_0.gguf"]
    hub.break_after = len(data) // 2
    assert fetch("org/big:Q4_0", tmp_path).read_bytes() == data
    starts = [one.headers.get("range") for one in hub.requests if one.host == "files"]
    numbers = [int(start[6:-1]) for start in starts[1:] if start is not None]
    assert starts[0] is None and len(numbers) == len(starts) - 1 > 0
    assert numbers == sorted({*numbers})


def test_ctrl_c_ends_a_transfer_and_keeps_what_has_arrived(hub: Hub, tmp_path: Path) -> None:
    data = big_repo(hub, 4 << 20).files["big-Q4_0.gguf"]
    hub.stall_after = len(data) // 2
    process = start_pull(hub, "org/big:Q4_0", tmp_path)
    blobs = tmp_path / "home/hub/models--org--big/blobs"
    wait_until(lambda: any(one.stat().st_size > len(data) // 3 for one in blobs.glob("*")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err
    assert [one.suffix for one in blobs.iterdir()] == [".incomplete"]


def test_a_file_that_arrives_damaged_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    data = big_repo(hub).files["big-Q4_0.gguf"]
    hub.corrupt = True
    with pytest.raises(SourceError, match="big-Q4_0.gguf arrived damaged .*; run again"):
        fetch("org/big:Q4_0", tmp_path)
    hub.corrupt = False
    assert fetch("org/big:Q4_0", tmp_path).read_bytes() == data


def test_files_that_a_loss_of_power_has_cut_are_fetched_again(hub: Hub, tmp_path: Path) -> None:
    folder = fetch("org/tiny", tmp_path)
    cut = {"config.json": b"", "model-00002-of-00002.safetensors": b"half"}
    for name, left in cut.items():
        (folder / name).resolve().write_bytes(left)
    with pytest.raises(SourceError, match="org/tiny is not complete in the cache"):
        resolve("org/tiny", tmp_path, offline=True)
    fetch("org/tiny", tmp_path)
    for name in cut:
        assert (folder / name).read_bytes() == hub.repos["org/tiny"].files[name]


def test_a_page_in_place_of_a_file_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    data = big_repo(hub).files["big-Q4_0.gguf"]
    hub.answer, hub.answer_to = PAGE, ("files",)
    with pytest.raises(SourceError, match="the transfer of big-Q4_0.gguf of org/big:Q4_0 broke"):
        fetch("org/big:Q4_0", tmp_path)
    hub.answer = None
    assert fetch("org/big:Q4_0", tmp_path).read_bytes() == data


# Failures: one sentence with the remedy, and no weights are fetched


def only(hub: Hub, *names: str, **options: Any) -> None:
    hub.add("org/other", dict.fromkeys(names, b"{}"), **options)


def architecture(hub: Hub) -> None:
    config = json.dumps({"architectures": ["ReformerForCausalLM"]}).encode()
    hub.add("org/other", {"config.json": config, "model.safetensors": b"weights"})


def answers(status: int, *to: str) -> Callable[[Hub], None]:
    def change(hub: Hub) -> None:
        hub.answer = PAGE if status == 200 else (status, {}, b"")
        hub.answer_to = to

    return change


def unreachable(hub: Hub) -> None:
    from huggingface_hub import constants

    setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # noqa: B010


def offline(hub: Hub) -> None:
    from huggingface_hub import constants

    setattr(constants, "HF_HUB_OFFLINE", True)  # noqa: B010


def with_token(token: str = TOKEN, **options: Any) -> Callable[[Hub], None]:
    def change(hub: Hub) -> None:
        os.environ["HF_TOKEN"] = token
        for name, value in options.items():
            setattr(hub.repos["org/tiny"], name, value)

    return change


def on_tiny(**options: Any) -> Callable[[Hub], None]:
    def change(hub: Hub) -> None:
        for name, value in options.items():
            setattr(hub.repos["org/tiny"], name, value)

    return change


ODD = (200, {}, json.dumps({"id": "org/tiny", "sha": "../../../x", "siblings": []}).encode())
GGUF_ONLY = ("m-Q8_0.gguf", "m-Q4_K_M.gguf")
SPLIT = ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "m-Q4_0.gguf")
FAILURES: tuple[tuple[str, str, Callable[[Hub], None] | None, str], ...] = (
    ("unknown", "org/none", None, r"model org/none is no existing folder, and \S+ has no such mod"),
    ("private", "org/tiny", on_tiny(private=True), "unless it is private: then set HF_TOKEN or"),
    ("gated", "org/tiny", on_tiny(gated=True), "org/tiny is gated; accept its terms on .*HF_TOKEN"),
    ("no access", "org/tiny", with_token(denied=True), "the account of the token .* has no access"),
    ("bad token", "org/tiny", with_token("hf_x"), "the hub refuses the token for org/tiny; renew"),
    (
        *("token with an ellipsis", "org/tiny", with_token("hf_…")),
        "the token for org/tiny has characters that no token has; set HF_TOKEN to the token",
    ),
    ("revision", "org/tiny@v9", None, "org/tiny has no revision v9; name a branch, a tag or"),
    ("commit", f"org/tiny@{'0' * 40}", None, "org/tiny has no revision 0000000"),
    ("readme", "org/other", lambda hub: only(hub, "README.md"), "holds no config.json, so it is"),
    ("adapter", "org/other", lambda hub: only(hub, "adapter.safetensors"), "holds no config.json"),
    ("no weights", "org/other", lambda hub: only(hub, "config.json"), "holds no safetensors, so"),
    (
        *("pickled", "org/other", lambda hub: only(hub, "config.json", "pytorch_model.bin")),
        "org/other holds only pickled weights, which can run code when read; use",
    ),
    (
        *("GGUF only", "org/other", lambda hub: only(hub, *GGUF_ONLY)),
        r"GGUF files only; name one of .*, such as org/other:Q4_K_M \(Q4_K_M, Q8_0\)",
    ),
    (
        *("quantisation", "org/other:Q5_0", lambda hub: only(hub, *GGUF_ONLY)),
        "org/other has no quantisation Q5_0; it has Q4_K_M, Q8_0",
    ),
    ("no GGUF", "org/tiny:Q4_0", None, "org/tiny has no GGUF file; leave out :Q4_0"),
    (
        *("half", "org/other:Q8_0", lambda hub: only(hub, *SPLIT[1:])),
        r"org/other has 1 of the 2 parts of org/other:Q8_0; name another .* \(Q4_0, Q8_0\)",
    ),
    (
        *("part and whole", "org/other:Q8_0", lambda hub: only(hub, *SPLIT, "x-Q8_0.gguf")),
        "org/other has no quantisation Q8_0; it has Q4_0, m-Q8_0, x-Q8_0",
    ),
    (
        "files of one name",
        *("org/other:m-Q8_0", lambda hub: only(hub, "a/m-Q8_0.gguf", "b/m-Q8_0.gguf")),
        "org/other:m-Q8_0 is several files .*; download one, and give its path",
    ),
    (
        "architecture",
        "org/other",
        architecture,
        "org/other: architecture ReformerForCausalLM is",
    ),
    (
        "GGUF architecture",
        "org/other:Q8_0",
        lambda hub: only(hub, *GGUF_ONLY, gguf={"architecture": "rwkv7"}),
        "org/other:Q8_0 is a GGUF of architecture rwkv7; known are .* and .. others",
    ),
    (
        *("disk", "org/tiny", lambda hub: setattr(hub, "claimed_size", 10**15)),
        "org/tiny needs 2000000.0 GB more, and the disk of .* GB free; make room, or choose",
    ),
    ("offline", "org/tiny", offline, "org/tiny is not complete in the cache, and HF_HUB_OFFLINE"),
    ("no network", "org/tiny", unreachable, r"cannot reach http://127.0.0.1:1 .*; check the netw"),
    ("page", "org/tiny", answers(200, "api"), "something other than a hub's data, such as a proxy"),
    ("page for a file", "org/tiny", answers(200, "resolve"), "something other than a hub's data,"),
    (
        *("path as a hash", "org/tiny", lambda hub: setattr(hub, "answer", ODD)),
        "something other than a hub's data",
    ),
    ("many requests", "org/tiny", answers(429, "api"), "the hub takes no more requests at present"),
    ("down", "org/tiny", answers(503, "api"), r"answered 503 about org/tiny; try again later"),
    (
        *("broken", "org/tiny", lambda hub: setattr(hub, "break_after", 1000)),
        r"the transfer of model-\S+ and .* of org/tiny broke off \(.*\); run again: what has arriv",
    ),
    (
        *("two of one quantisation", "org/other:Q8_0"),
        *(lambda hub: only(hub, "a-Q8_0.gguf", "b-Q8_0.gguf"), "it has a-Q8_0, b-Q8_0"),
    ),
    ("empty", "", None, "the model is an empty text; give its name or path"),
    ("no slash", "qwen3-1.7", None, r"neither a known name \(qwen3-1.7b.*`jaxinfer list` shows"),
    ("address", "https://host/org/tiny", None, r"no name of the hub; write ORG/NAME\[@REVISION\]"),
    ("syntax", "org/na me", None, r"no name of the hub; write ORG/NAME\[@REVISION\]\[:QUANT\]"),
    ("empty quantisation", "org/tiny:", None, r"no name of the hub; write ORG/NAME"),
    ("two quantisations", "org/tiny:Q4:Q5", None, r"no name of the hub; write ORG/NAME"),
)


@pytest.mark.parametrize(
    ("reference", "change", "words"),
    [one[1:] for one in FAILURES],
    ids=[one[0] for one in FAILURES],
)
def test_failures_are_one_sentence(
    reference: str,
    change: Callable[[Hub], None] | None,
    words: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    if change is not None:
        change(hub)
    with pytest.raises(JaxinferError) as raised:
        resolve(reference, tmp_path)
    message = str(raised.value)
    assert re.search(words, message), message
    assert "\n" not in message and not message.endswith(".") and "; " in message
    assert hub.break_after is not None or hub.served == 0
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    only(hub, "config.json")
    folder = write_hf_folder(tmp_path / "local", tiny_llama_config())
    with pytest.raises(SourceError, match="org/other holds no tokenizer; name another repository"):
        resolve(str(folder), tmp_path, load_format="dummy", tokenizer="org/other")


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JaxinferError, match="cannot write .*; make it writable, or choose another"):
        resolve("org/tiny", tmp_path, download_dir=str(tmp_path / "file"))


def test_local_models_do_not_import_the_hub(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tiny_llama_config())
    script = f"""
import sys
from pathlib import Path
import jaxinfer.cli.main
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.weights.locate import Places, locate
locate({str(folder)!r}, Places(Path("x")), NO_PROGRESS)
assert "huggingface_hub" not in sys.modules and "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
