"""What is imported when, on the way to an engine; fakes of JAX tell the order, not time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.core.collector import NEVER, nothing_collected, old_left_alone
from jaxinfer.core.config import ALLOCATOR_PREALLOCATES, ALLOCATOR_SHARES, EngineConfig
from jaxinfer.core.errors import EngineError, TokenizerError
from jaxinfer.engine.start import build
from jaxinfer.engine.start import loading as engine_loading
from jaxinfer.engine.start.start import backend_starting, start_engine
from jaxinfer.models import build_model
from jaxinfer.text import tokenizer
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

SHARE = ALLOCATOR_SHARES[0]


class Backend:
    """Starts once it is let; notes what share of a GPU was set then."""

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
        raise RuntimeError("there is no device")  # which is for those who ask for one


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
    ids=["default", "given", "given beside a bundle"],
)
def test_imports_go_on_while_the_backend_starts(
    backend: Backend, settings: dict[str, object], share: str
) -> None:
    with backend_starting(EngineConfig(**settings)):  # type: ignore[arg-type]
        assert backend.begun.wait(10)
        assert not backend.over  # and lasts until somebody lets it
    assert backend.share == share


def test_a_backend_that_does_not_start_is_told(backend: Backend) -> None:
    """JAX itself would answer with a CPU, the next time that it is asked."""
    backend.let.set()
    with pytest.raises(EngineError, match="there is no device"):
        start_engine(EngineConfig(model="never looked for"))


@pytest.mark.parametrize(
    ("manifest", "share"),
    [
        ('{"settings": {"gpu_memory_utilization": 0.7}}', "0.7"),
        ('{"settings": {"gpu_memory_utilization": null}}', "0.92"),
        ('{"settings": []}', None),
        ("junk", None),
        (None, None),
    ],
    ids=["said", "default", "other", "junk", "none"],
)
def test_a_bundle_says_how_much_of_a_gpu_is_the_allocators(
    manifest: str | None, share: str | None, backend: Backend, tmp_path: Path
) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with backend_starting(EngineConfig(bundle=str(tmp_path))):
        assert backend.begun.wait(10) if share else not backend.begun.is_set()
    assert (backend.share if share else os.environ.get(SHARE)) == share


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError), nothing_collected():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_old_objects_are_left_alone_meanwhile_by_whoever_is_at_it() -> None:
    before = gc.get_threshold()
    first, second = old_left_alone(), old_left_alone()
    with pytest.raises(KeyError), first:
        second.__enter__()
        assert gc.get_threshold() == (*before[:2], NEVER)
        raise KeyError
    second.__exit__(None, None, None)  # which began later, and ends later
    assert gc.get_threshold() == before


# Orbax alone takes a fifth of all imports, Flax another, Mosaic's kernels a tenth; Triton is for
# GPUs, Jinja and tokenizers for who reads a tokenizer, gguf for who reads such a file
UNUSED = ("orbax", "tensorstore", "jax.experimental.mosaic", "jax_triton", "triton", "scipy")
UNUSED += ("flax", "jinja2", "tokenizers", "gguf")


def test_an_engine_of_plain_weights_imports_nothing_that_it_does_not_use() -> None:
    script = "import sys, jaxinfer.engine.start.build, jaxinfer.models.qwen3; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert "jax" in modules
    assert not {*UNUSED} & {*modules}


def test_the_offline_api_is_named_without_jax() -> None:
    script = "import sys; from jaxinfer import LLM, AsyncLLM; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"


def test_the_tokenizer_is_checked_before_a_minute_of_compiling_and_read_beside_loading(
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
        build.build_engine(config)
    assert not (tmp_path / "cache" / "executables").exists()
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    build.build_engine(config)

    loading, reading = threading.Event(), threading.Event()
    build_executables, load_tokenizer = engine_loading.build_executables, tokenizer.load_tokenizer

    def loads(*arguments: Any, **named: Any) -> Any:
        loading.set()
        assert reading.wait(10), "the tokenizer is read after the executables"
        return build_executables(*arguments, **named)

    def reads(*arguments: Any) -> Any:
        reading.set()
        assert loading.wait(10), "the tokenizer is read before the executables"
        return load_tokenizer(*arguments)

    monkeypatch.setattr(engine_loading, "build_executables", loads)
    monkeypatch.setattr(tokenizer, "load_tokenizer", reads)
    assert build.build_engine(config).tokenizer is not None
