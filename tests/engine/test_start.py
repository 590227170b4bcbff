"""The order of imports, the backend's start and loading; fakes record it, so time is no matter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.core.config import ALLOCATOR_PREALLOCATES, ALLOCATOR_SHARES, EngineConfig
from jaxinfer.core.errors import EngineError, TokenizerError
from jaxinfer.engine.start import build
from jaxinfer.engine.start import loading as engine_loading
from jaxinfer.engine.start.start import backend_starting, start_engine
from jaxinfer.models import build_model
from jaxinfer.text import tokenizer
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json
from pallas_kernels.native.library import BrokenLibrary

SHARE = ALLOCATOR_SHARES[0]


class Backend:
    """A fake backend: starts when ``let`` is set, and records the GPU share that was set then."""

    def __init__(self) -> None:
        self.share, self.over = "", False
        self.let, self.begun = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.share = os.environ[SHARE]
        self.begun.set()
        self.let.wait(5)
        if self.over:
            return "cpu"
        self.over = True
        raise RuntimeError("there is no device")  # as JAX does, once


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Generator[Backend]:
    backend = Backend()
    monkeypatch.setattr(jax, "default_backend", backend)
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in (*ALLOCATOR_SHARES, ALLOCATOR_PREALLOCATES):
        os.environ.pop(name, None)
    yield backend
    backend.let.set()


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, "0.92"),
        ({"gpu_memory_utilization": 0.5}, "0.5"),
        ({"gpu_memory_utilization": 0.5, "bundle": "somewhere"}, "0.5"),
    ],
    ids=["default", "given", "given with a bundle"],
)
def test_imports_go_on_while_the_backend_starts(
    backend: Backend, settings: dict[str, object], share: str
) -> None:
    with backend_starting(EngineConfig(**settings)):  # type: ignore[arg-type]
        assert backend.begun.wait(10)
        assert not backend.over  # it waits for ``let``
    assert backend.share == share


def test_the_error_of_a_backend_is_raised(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although JAX itself falls back to the CPU after the first error, unless it is reset.

    A real reset would take the devices from the executables of other tests.
    """
    resets: list[bool] = []
    monkeypatch.setattr("jaxinfer.engine.start.build.clear_backends", lambda: resets.append(True))
    backend.let.set()
    with pytest.raises(EngineError, match="there is no device"):
        start_engine(EngineConfig(model="never looked for"))
    assert resets


def test_a_broken_native_library_is_an_error_before_the_model_is_resolved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise BrokenLibrary("the native library is cut off")

    monkeypatch.setattr(build, "library", refuse)
    with pytest.raises(EngineError, match="the native library is cut off"):
        build.plan_engine(EngineConfig(model="no such model"))


@pytest.mark.parametrize(
    ("manifest", "share"),
    [
        ('{"settings": {"gpu_memory_utilization": 0.7}}', "0.7"),
        ('{"settings": {"gpu_memory_utilization": null}}', "0.92"),
        ('{"settings": []}', None),
        ("junk", None),
        ('{"settings": {"gpu_memory_utilization": [1]}}', None),
        ("[" * 100_000, None),
        (None, None),
    ],
    ids=["given", "default", "other", "junk", "no number", "nested", "none"],
)
def test_the_allocator_share_comes_from_the_bundle(
    manifest: str | None, share: str | None, backend: Backend, tmp_path: Path
) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with backend_starting(EngineConfig(bundle=str(tmp_path))):
        assert backend.begun.wait(10) if share else not backend.begun.is_set()
    assert (backend.share if share else os.environ.get(SHARE)) == share


def test_no_share_is_read_from_a_bundle_that_others_may_change(
    backend: Backend, tmp_path: Path
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"settings": {"gpu_memory_utilization": 0.7}}')
    manifest.chmod(0o666)
    with backend_starting(EngineConfig(bundle=str(tmp_path))):
        assert not backend.begun.is_set()
    assert os.environ.get(SHARE) is None


# Orbax takes a fifth of all import time, Flax another, Mosaic's kernels a tenth; Triton is only for
# GPUs, Jinja and tokenizers only for tokenizers, gguf only for GGUF files
UNUSED = ("orbax", "tensorstore", "jax.experimental.mosaic", "jax_triton", "triton", "scipy")
UNUSED += ("flax", "jinja2", "tokenizers", "gguf")


def test_slow_libraries_are_not_imported_before_they_are_used() -> None:
    script = "import sys, jaxinfer.engine.start.build, jaxinfer.models.qwen3; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert "jax" in modules
    assert not {*UNUSED} & {*modules}


def test_a_tokenizer_needs_no_jinja_before_its_first_chat() -> None:
    script = "import sys, jaxinfer.text.tokenizer; print('jinja2' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"


def test_importing_the_api_does_not_import_jax() -> None:
    script = "import sys; from jaxinfer import LLM, AsyncLLM; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"


def test_the_tokenizer_is_read_before_compiling_and_while_executables_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hf_config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, eos_token_id=257)
    write_hf_folder(folder, hf_config, random_hf_tensors(build_model(hf_config, "float32")))
    (folder / "tokenizer.json").write_text("{}")
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_num_seqs=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        prefill_bucket_start=64,
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(TokenizerError, match="cannot be read"):
        start_engine(config)
    assert not (tmp_path / "cache" / "executables").exists()
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    start_engine(config)

    loading, reading = threading.Event(), threading.Event()
    build_executables, load_tokenizer = engine_loading.build_executables, tokenizer.load_tokenizer

    def loads(*arguments: Any, **named: Any) -> Any:
        loading.set()
        assert reading.wait(10), "the tokenizer is read after the executables"
        return build_executables(*arguments, **named)

    def reads(*arguments: Any, **named: Any) -> Any:
        reading.set()
        assert loading.wait(10), "the tokenizer is read before the executables"
        return load_tokenizer(*arguments, **named)

    monkeypatch.setattr(engine_loading, "build_executables", loads)
    monkeypatch.setattr(tokenizer, "load_tokenizer", reads)
    assert start_engine(config).tokenizer is not None

    def fails(*_: Any, **__: Any) -> Any:
        raise TokenizerError("read twice")

    monkeypatch.setattr(tokenizer, "load_tokenizer", fails)
    with pytest.raises(TokenizerError, match="read twice"):  # in its thread
        start_engine(config)
