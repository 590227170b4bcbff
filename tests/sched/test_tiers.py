"""The scheduler with tiers: random traces, and what is saved, restored and computed."""

from __future__ import annotations

from collections import Counter

import pytest

from kit.tier_traces import TierTrace

DAILY, NIGHTLY = 250, 100_000


def test_tiers_change_no_token() -> None:
    found = Counter[str]()
    for seed in range(DAILY):
        found += run(seed)
    # the traces do what they are for
    assert found["restored"] > DAILY // 2 and found["failed"] > 5, found


@pytest.mark.nightly
def test_tiers_change_no_token_in_many_traces() -> None:
    for seed in range(DAILY, DAILY + NIGHTLY):
        run(seed)


def run(seed: int) -> Counter[str]:
    """Run the trace of a seed; what its tiers have done."""
    trace = TierTrace(seed)
    try:
        trace.run()
    except Exception as error:
        error.add_note(f"the trace of seed {seed}")
        raise
    assert trace.drive.tiers is not None
    stats = trace.drive.tiers.stats()
    return Counter(restored=stats.num_restored, saved=stats.num_saved, failed=stats.num_failed)
