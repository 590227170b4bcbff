"""Saves in flight: how many bytes of the device they may take, and what is reported of them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.core.limits import Limits
from jaxinfer.core.tiers import Saved, TierChanged, TierOrders, TierPolicy, TierUnit, key_in
from jaxinfer.exec.tiers.host import HostTier
from jaxinfer.exec.tiers.runner import TierRunner
from kit.drive import make_limits
from kit.fake_executor import FakeExecutor
from kit.fake_tiers import FakeMover

PAGE_BYTES = 32


def runner_of(most_pages: int) -> TierRunner:
    """A runner over stand-ins, whose saves end after some looks."""
    limits: Limits = make_limits()
    executor = FakeExecutor(limits.page_size, limits.groups)
    mover = FakeMover(limits, lambda: executor, num_looks=2)
    host = HostTier(1 << 16, mover.forms)
    return TierRunner(mover, host, TierPolicy(), most_saving_bytes=most_pages * PAGE_BYTES)


def orders(*pages: int) -> TierOrders:
    return TierOrders(tuple(TierUnit(key_in(0, page.to_bytes(16)), page) for page in pages))


@pytest.mark.parametrize(
    ("most_pages", "ended"),
    [
        (10, 0),  # no save waits for another one
        (4, 1),  # the third one waits for the first
        (3, 2),  # and for both
        (1, 2),  # as one that is larger than all: until it is alone
    ],
)
def test_saves_wait_until_the_device_has_memory_for_them(most_pages: int, ended: int) -> None:
    runner = runner_of(most_pages)
    for pages in ((1, 2), (3,), (4, 5, 6)):
        runner.obey(orders(*pages))
    own: Any = runner
    assert own._num_ended == ended and runner.num_saving == 3


def test_the_end_of_saves_is_reported_with_their_keys() -> None:
    runner = runner_of(100)
    runner.obey(orders(1, 2))
    runner.obey(orders(3))
    events = [event for _ in range(10) for event in runner.poll()]
    counts = [event.count for event in events if isinstance(event, Saved)]
    added = [key for event in events if isinstance(event, TierChanged) for key in event.added]
    assert sum(counts) == 2 and len(added) == 3 and not runner.num_saving


def test_saves_that_are_cleared_are_not_reported() -> None:
    runner = runner_of(2)
    runner.obey(orders(1))
    runner.obey(orders(2, 3))
    runner.clear(weights_changed=True)
    assert not runner.num_saving and not runner.poll()
    runner.obey(orders(4, 5))  # they take no memory any more
    own: Any = runner
    assert own._num_ended == 0
