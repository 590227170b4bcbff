"""Validation of settings; the cache folder from setting, environment or XDG; shape helpers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
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
        ({"kernels": "append_decode"}, "kernels must be op=implementation,..."),
        ({"kernels": "a=xla,a=triton"}, "kernels must be op=implementation,... of different ops"),
        ({"kernels": ""}, "kernels must be"),
        ({"kernels": {"a": "xla"}}, "kernels must be"),
        ({"prefill_bucket_factor": 1}, "prefill_bucket_factor must be at least 2, got 1"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_model_len": 10.5}, "max_model_len must be a whole number, got 10.5"),
        ({"max_model_len": "8k"}, "max_model_len must be a whole number, got '8k'"),
        ({"page_size": "big"}, "page_size must be a whole number, got 'big'"),
        ({"seed": "1"}, "seed must be a whole number"),
        ({"seed": 1.5}, "seed must be a whole number"),
        ({"seed": 2**63}, "seed must be a whole number of 64 bits"),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
        ({"overlap": None}, "overlap must be True or False, got None"),
        ({"prefill_first": 1}, "prefill_first must be True or False, got 1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization must be a number"),
        ({"dtype": np.dtype("float32")}, "dtype .* is unknown"),
        ({"generation_config": "folder"}, "generation_config 'folder' is unknown; use one of auto"),
        ({"model": 5}, "model must be text or a path, got 5"),
        ({"model": None}, "model must be text or a path, got None"),
        ({"cache_dir": b"x"}, "cache_dir must be text or a path"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_values_are_stored_in_canonical_form() -> None:
    given: dict[str, Any] = {"model": Path("m"), "cache_dir": Path("c"), "num_pages": np.int64(9)}
    config = EngineConfig(**given, tokenizer=None, gpu_memory_utilization=1)
    assert (config.model, config.cache_dir, config.num_pages) == ("m", "c", 9)
    assert (type(config.num_pages), config.gpu_memory_utilization) == (int, 1.0)


def test_cache_root_in_the_home_of_an_unknown_user() -> None:
    with pytest.raises(ConfigError, match="~nobody-of-that-name/c is in a home folder that cannot"):
        cache_root("~nobody-of-that-name/c")


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
