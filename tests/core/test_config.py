"""Settings are checked when they are made; the cache folder follows setting, environment, XDG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.config import EngineConfig, cache_root
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.shapes import cdiv, ladder, round_up


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is unknown; use one of auto, float32"),
        ({"load_format": "pickle"}, "load_format 'pickle' is unknown"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"page_size": -16}, "page_size"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_cache_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXINFER_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root() == Path("/x/jaxinfer")
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "/j")
    assert cache_root() == Path("/j")
    assert cache_root("/given") == Path("/given")
    monkeypatch.delenv("JAXINFER_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "jaxinfer"


def test_shapes() -> None:
    assert (cdiv(9, 4), cdiv(8, 4), round_up(9, 4)) == (3, 2, 12)
    assert ladder(1, 6, 2) == (1, 2, 4, 6)
    assert ladder(64, 16, 8) == (16,)
