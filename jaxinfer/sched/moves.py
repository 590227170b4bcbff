"""``Moves``: the copies to and from tiers that one call of the scheduler orders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from immutables import Map

from jaxinfer.core.tiers import SNAPSHOTS, Load, TierOrders, TierUnit, key_in


class Evicted(NamedTuple):
    """A page that lost its prefix before a tier had it, and still holds it."""

    pool: int
    unit: TierUnit


class Moves:
    """The orders of one call while it builds them; and the keys that tiers have.

    ``evicted``: pages that are saved before a step or a load writes to them, the first one first.
    A prompt takes all of its pages when it is admitted, so this may be long before. ``held``: loads
    of earlier calls that wait until the pages to which they write are saved. ``saving``: keys of
    the saves in flight, of each call that ordered some, the oldest first.
    """

    def __init__(
        self,
        keys: Map[bytes, None],
        evicted: tuple[Evicted, ...],
        held: tuple[Load, ...],
        saving: tuple[tuple[bytes, ...], ...],
    ) -> None:
        self.keys: Map[bytes, None] = keys
        self.evicted, self.held, self.saving = evicted, held, saving
        self._in_flight: set[bytes] | None = None  # memo of the keys in ``saving``
        self.saves: list[TierUnit] = []
        self.offloads: dict[bytes, TierUnit] = {}  # saves of preempted sequences, by key
        self.loads: list[Load] = []
        self.dropped: list[int] = []

    def save(self, units: Iterable[TierUnit]) -> list[TierUnit]:
        """Save the ``unknown`` ones of these units; returns them."""
        added = self.unknown(units)
        self.saves += added
        return added

    def offload(self, units: Iterable[TierUnit]) -> None:
        """Save these units of a preempted sequence, but those that a tier has, however many."""
        self.offloads.update((unit.key, unit) for unit in self.unknown(units))

    def unknown(self, units: Iterable[TierUnit]) -> list[TierUnit]:
        """Those of the units that no tier has, and of which no save is in flight."""
        if self._in_flight is None:
            self._in_flight = {key for keys in self.saving for key in keys}
        keys, in_flight, offloads = self.keys, self._in_flight, self.offloads
        return [
            unit
            for unit in units
            if unit.key not in keys and unit.key not in in_flight and unit.key not in offloads
        ]

    def end_saves(self, count: int) -> None:
        """The saves of so many calls have ended."""
        self.saving, self._in_flight = self.saving[count:], None

    def begin_saves(self) -> None:
        """The saves of this call, if there are any, are in flight from now on."""
        if units := (*self.offloads.values(), *self.saves):
            self.saving = (*self.saving, tuple([unit.key for unit in units]))

    def save_snapshot(self, page_hash: bytes, row: int) -> None:
        """Save the state in a row."""
        self.save((TierUnit(key_in(SNAPSHOTS, page_hash), row),))

    def change(self, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note the keys that tiers have gained and lost."""
        keys = self.keys.mutate()
        for key in removed:
            keys.pop(key, None)
        for key in added:
            keys[key] = None
        self.keys = keys.finish()

    def reset(self, *, keeps_keys: bool) -> None:
        """Order nothing that concerns the device's pages, whose content is lost."""
        self.evicted = self.held = ()
        self.saves.clear()
        self.offloads.clear()
        self.loads.clear()
        if not keeps_keys:  # the tiers are cleared, and report no save that was in flight
            self.keys, self.saving, self._in_flight = Map(), (), None

    @property
    def orders(self) -> TierOrders:
        """The orders of this call."""
        saves = (*self.offloads.values(), *self.saves)
        return TierOrders(saves, tuple(self.loads), tuple(self.dropped))
