"""A level on a simulated device: every token arrives; a bound on mixed steps shortens them."""

from __future__ import annotations

import numpy as np

from bench.levels import Level, Outcome, gpu_limits, run

BURST = Level(sent=[0.0] * 96, num_cached=32, input_len=256, output_len=24)


def longest_gap(outcome: Outcome) -> float:
    return max(float(np.diff(times).max()) for times in outcome.tokens)


def test_every_request_gets_its_tokens_in_order_of_time() -> None:
    outcome = run(gpu_limits(None), BURST)
    assert [len(times) for times in outcome.tokens] == [24] * 96
    assert all(times == sorted(times) and times[0] > 0 for times in outcome.tokens)
    # all but the last page of a cached prompt is reused
    prompts = sum(row.num_scheduled_tokens for *_, plan in outcome.steps for row in plan.prefills)
    assert prompts == 32 * 16 + 64 * 256
    assert len(outcome.by_bucket()) == len({plan.bucket for *_, plan in outcome.steps})
    assert outcome.line().endswith("tok/s")


def test_a_smaller_mixed_step_delays_decoding_less() -> None:
    small, large = (run(gpu_limits(most), BURST) for most in (512, 8192))
    assert longest_gap(small) < 25 < 50 < longest_gap(large)
