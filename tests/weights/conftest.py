"""Fixtures: a tiny Llama as a folder and as a GGUF file, for tests that damage it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.models.registry import build_model
from kit.checkpoints import (
    Tensors,
    random_hf_tensors,
    tiny_llama_config,
    write_gguf,
    write_hf_folder,
)

CONFIG = tiny_llama_config()


@pytest.fixture
def tensors() -> Tensors:
    return random_hf_tensors(build_model(CONFIG, "float32"))


@pytest.fixture
def folder(tmp_path: Path, tensors: Tensors) -> Path:
    return write_hf_folder(tmp_path / "model", CONFIG, tensors)


@pytest.fixture
def gguf_file(tmp_path: Path, tensors: Tensors) -> Path:
    return write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
