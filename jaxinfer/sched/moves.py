"""``Moves``: the copies to and from tiers that one call of the scheduler orders."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from immutables import Map

from jaxinfer.core.tiers import SNAPSHOTS, Load, TierOrders, TierPolicy, TierUnit, key_in


class Moves:
    """The orders of one call while it builds them; and the keys that tiers have."""

    def __init__(self, keys: Map[bytes, None]) -> None:
        self.keys: Map[bytes, None] = keys
        self.saves: list[TierUnit] = []
        self.offloads: dict[bytes, TierUnit] = {}  # saves of preempted sequences, by key
        self.loads: list[Load] = []
        self.dropped: list[int] = []

    def save(self, units: Iterable[TierUnit]) -> None:
        """Save these units, but those that a tier has."""
        known = self.keys, self.offloads
        self.saves += [unit for unit in units if not any([unit.key in one for one in known])]

    def offload(self, units: Iterable[TierUnit]) -> None:
        """Save these units of a preempted sequence, but those that a tier has, however many."""
        self.offloads.update((unit.key, unit) for unit in units if unit.key not in self.keys)

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
        self.saves.clear()
        self.offloads.clear()
        self.loads.clear()
        if not keeps_keys:
            self.keys = Map()

    def orders(self, policy: TierPolicy) -> TierOrders:
        """The orders: all offloads, and as many of the other saves as the policy allows."""
        ends = list(accumulate(policy.num_bytes((unit.key,)) for unit in self.saves))
        count = bisect_right(ends, policy.most_save_bytes)
        return TierOrders(
            (*self.offloads.values(), *self.saves[:count]),
            tuple(self.loads),
            tuple(self.dropped),
        )
