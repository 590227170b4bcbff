"""Host work of a decode step, as a number of calls, which does not depend on the machine."""

from __future__ import annotations

import sys
from types import FrameType

from jaxinfer.core.request import RequestSpec, SamplingParams
from kit.engines import tiny_engine, tiny_limits

STEPS = 64
MAX_CALLS = 160  # of Python and C functions at one row: 148 in November 2026, once 245


def test_a_decode_step_makes_few_calls() -> None:
    engine = tiny_engine(tiny_limits(page_size=64, enable_prefix_caching=False), tokenizer=False)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("a", RequestSpec((1, 2, 3), params))
    for _ in range(8):
        engine.step()
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        del frame, argument
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            engine.step()
    finally:
        sys.setprofile(None)
    assert calls / STEPS < MAX_CALLS
