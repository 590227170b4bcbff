"""Resolves a model reference as the engine does.

Owns: ``resolve``, and ``load``, which stops after the headers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.load import load_params
from jaxinfer.weights.sources import ModelSource, resolve_source


def resolve(reference: Path | str, **options: Any) -> ModelSource:
    """The source of a reference."""
    options = {"cache_dir": Path("unused"), "progress": NoProgress()} | options
    return resolve_source(str(reference), **options)


def load(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load without reading a tensor: reading any tensor fails the test."""

    def refuse(*_: object) -> None:
        raise AssertionError("data was read before all headers were checked")

    source = resolve(reference)
    model = build_model(source.hf_config, "float32")
    monkeypatch.setattr(type(source.checkpoint), "read", refuse)
    load_params(
        model,
        source,
        placement=default_placement(),
        cache_dir=Path("unused"),
        seed=0,
        progress=NoProgress(),
    )
