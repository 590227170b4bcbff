"""The bench of the engine's overhead runs on the parts of an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench import engine_overhead
from jaxinfer.core.config import EngineConfig
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf


def test_engine_and_bare_steps_of_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(tmp_path / "cache"))
    # few executables: compiling is the time
    small = partial(
        EngineConfig, max_num_seqs=2, max_num_batched_tokens=32, prefill_bucket_start=32
    )
    monkeypatch.setattr(engine_overhead, "EngineConfig", small)
    config = tiny_llama_config(num_hidden_layers=1, max_position_embeddings=32)
    model = build_model(config, dtype="float32")
    tensors, merged = random_hf_tensors(model), {95: "!!"}  # the result of its one merge
    path = write_gguf(tmp_path / "m.gguf", config, tensors, special=merged)
    samples, splits = engine_overhead.measure_overhead(
        path,
        [[*range(1, 21)], [*range(2, 22)]],  # the second one ends when the first has two tokens
        batches=(1, 2),
        num_tokens=4,
        repeats=2,
    )
    cases = {(name, batch): 2 for name in ("engine", "bare") for batch in (1, 2)}
    assert {case: len(found) for case, found in samples.items()} == cases
    assert all(seconds > 0 for found in samples.values() for seconds in found)
    assert {"schedule", "pack", "dispatch", "collect"} <= splits[1].keys()
