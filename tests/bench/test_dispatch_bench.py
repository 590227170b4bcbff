"""The bench of a call's host time, on a tiny model."""

from __future__ import annotations

import pytest

from bench import dispatch
from jaxinfer.exec.compile.program import Program
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model

LIMITS = tiny_limits(max_num_seqs=1, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", [bucket.name for bucket in LIMITS.buckets])
def test_each_call_is_timed_and_keeps_the_state(name: str) -> None:
    model, params = tiny_model("qwen3")
    device = dispatch.Device(Program(model, LIMITS), params)
    calls = device.calls(name)
    taken = dispatch.measure(calls, repeats=1)
    assert tuple(taken) == dispatch.CALLS
    assert all(value > 0 for value in taken.values())
    assert device.num_leaves == 3 + 6 * 2 + 2 * 2 + 6  # whole model, layers, pages, slots
    within = dispatch.spans(calls["step"], times=2)
    assert any("flat_step" in span for span in within)
    assert list(within.values()) == sorted(within.values(), reverse=True)
