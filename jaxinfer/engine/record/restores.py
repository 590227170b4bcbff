"""``Restores``: saves and loads the units of tiers again while the steps of a recording run.

What the recorded engine saved is gathered from the pages of the replay, at the same place in the
order of steps, and kept in host memory until a recorded event says that the tiers have lost it.
Units that were in a tier before the recording, or came from elsewhere, are not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from jaxinfer.core.connector import Unit
from jaxinfer.core.tiers import TierOrders, TierUnit, group_of
from jaxinfer.exec.tiers.mover import PageMover, Saving

POLL_SECONDS = 50e-6
LIMIT_SECONDS = 30.0  # for a copy, before it counts as failed


class Restores:
    """The units of tiers in a replay."""

    def __init__(self, mover: PageMover) -> None:
        self._mover = mover
        self._units: dict[bytes, Unit] = {}
        # of loads that were ordered, by ticket: the units that are there, and their places
        self._loads: dict[int, list[tuple[Unit, TierUnit]]] = {}

    def obey(self, orders: TierOrders, is_known: Callable[[TierUnit], bool]) -> list[TierUnit]:
        """Do what one call of the scheduler orders, before its step is launched.

        Units whose content ``is_known`` are saved. Returns those of new loads that are not there,
        whose places keep what they have.
        """
        for ticket in orders.dropped:
            self._loads.pop(ticket, None)
        known = [unit for unit in orders.saves if is_known(unit)]
        self.forget(unit.key for unit in orders.saves if unit not in known)
        if known:
            self._save(self._mover.gather(known))
        missing: list[TierUnit] = []
        for load in orders.loads:
            there = [unit for unit in load.units if unit.key in self._units]
            missing += [unit for unit in load.units if unit.key not in self._units]
            self._loads[load.ticket] = [(self._units[unit.key], unit) for unit in there]
        return missing

    def loaded(self, ticket: int, *, failed: bool) -> None:
        """A load of the recording has ended: write its units to their places, unless it failed."""
        found = self._loads.pop(ticket, ())
        if found and not failed:
            units, places = zip(*found, strict=True)
            _wait(self._mover.load(units, places), lambda own: own.advance())

    def forget(self, keys: Iterable[bytes]) -> None:
        """The tiers of the recording have lost these units."""
        for key in keys:
            self._units.pop(key, None)

    def clear(self, *, keeps_units: bool) -> None:
        """The scheduler was reset."""
        self._loads.clear()
        if not keeps_units:
            self._units.clear()

    def _save(self, saving: Saving) -> None:
        _wait(saving, lambda own: own.is_ready)
        memory = [self._mover.forms[group_of(key)].new() for key in saving.keys]
        saving.copy_to(memory)
        _wait(saving, lambda own: own.is_copied)
        for key, content in zip(saving.keys, memory, strict=True):
            # The tier had no space for it, or has not reported it yet: it is not known which
            # content the tier has, if they differ.
            old = self._units.pop(key, None)
            if old is None or np.array_equal(old.content, content):
                self._units[key] = Unit(group_of(key), key, content)


def _wait[T](copy: T, is_done: Callable[[T], bool]) -> None:
    """Wait for a copy; raises ``TimeoutError``."""
    end = time.monotonic() + LIMIT_SECONDS
    while not is_done(copy):
        if time.monotonic() > end:
            raise TimeoutError(f"a copy of pages took longer than {LIMIT_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
