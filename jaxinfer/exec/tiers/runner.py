"""``TierRunner``: does what the scheduler orders of tiers, and reports what has ended as events."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxinfer.core.connector import Connector, Forms, Unit
from jaxinfer.core.step import Event
from jaxinfer.core.tiers import (
    SNAPSHOTS,
    CostModel,
    Load,
    Loaded,
    TierChanged,
    TierOrders,
    TierPolicy,
    TierStats,
    group_of,
)
from jaxinfer.exec.tiers.mover import Gathered, PageMover


class TierRunner:
    """Moves units between the device and a connector; on the engine's thread."""

    def __init__(
        self,
        mover: PageMover,
        connector: Connector,
        policy: TierPolicy,
        sizes: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """``sizes``: the present values of ``TierStats``."""
        self._mover, self._connector, self._sizes = mover, connector, sizes
        self.policy = policy
        self._version = b""  # of the weights: see ``Connector.clear``
        self._bytes = {group: form.num_bytes for group, form in mover.forms.items()}
        self._gathers: deque[Gathered] = deque()
        self._loads: dict[int, tuple[Load, float]] = {}  # with the time of the order
        self._staged: dict[int, Any] = {}  # units on their way to the device
        self._ready: dict[int, Any] = {}  # units that can be scattered
        self._counters = TierStats()

    @property
    def is_loading(self) -> bool:
        """True if a load has been ordered that has not been reported."""
        return bool(self._loads)

    @property
    def num_held(self) -> int:
        """Loads whose units are kept, until they are restored or dropped."""
        return len(self._loads) + len(self._staged) + len(self._ready)

    @property
    def is_shared(self) -> bool:
        """See ``Connector``."""
        return self._connector.is_shared

    def obey(self, orders: TierOrders) -> None:
        """Queue the copies of one call of the scheduler, before its step is launched."""
        for restore in orders.restores:
            self._mover.scatter(self._ready.pop(restore.ticket), restore.units)
        if orders.saves:
            self._gathers.append(self._mover.gather(orders.saves))
        for load in orders.loads:
            self._loads[load.ticket] = load, time.monotonic()
            self._connector.load(load.ticket, load.keys)
        for ticket in orders.dropped:
            self._forget(ticket)

    def look_up(self, keys: Sequence[bytes]) -> tuple[Event, ...]:
        """The event of units of a prompt that others have saved."""
        found = self._connector.match(keys)
        return (TierChanged(tuple(found)),) if found else ()

    def poll(self, seconds: float = 0.0) -> tuple[Event, ...]:
        """The events of copies that have ended; waits so long for the first of them."""
        self._save_gathered()
        polled = self._connector.poll(seconds)
        events: list[Event] = []
        if polled.added or polled.removed:
            changed = dict.fromkeys((*polled.added, *polled.removed))
            there = dict.fromkeys(self._connector.match(tuple(changed)))
            removed = tuple(key for key in changed if key not in there)
            events.append(TierChanged(tuple(there), removed))
        for ticket, units in polled.loaded.items():
            events += self._loaded(ticket, units)
        for ticket in [ticket for ticket, staged in self._staged.items() if staged.is_ready]:
            self._ready[ticket] = self._staged.pop(ticket)
            load, since = self._loads.pop(ticket)
            self._connector.finished(ticket)
            self._count(
                num_restored=len(load.keys),
                restored_bytes=self._num_bytes(load.keys),
                restore_seconds=time.monotonic() - since,
            )
            events.append(Loaded(ticket))
        return tuple(events)

    def clear(self, *, weights_changed: bool) -> None:
        """Drop all units; no step is in flight."""
        self._gathers.clear()
        for ticket in (*self._loads, *self._ready):
            self._forget(ticket)
        if weights_changed:
            self._version = secrets.token_bytes(16)
        self._connector.clear(self._version)

    def close(self) -> None:
        """Save what has been copied, and end the connector's threads."""
        self.poll()
        self._connector.close()

    def stats(self) -> TierStats:
        """Counters and present values."""
        return msgspec.structs.replace(self._counters, **self._sizes())

    def _save_gathered(self) -> None:
        """Copy the units of ended gathers to the tier."""
        while self._gathers and self._gathers[0].is_ready:
            since, units = time.monotonic(), self._gathers.popleft().read()
            saved, num_bytes, num_dropped = 0, 0, 0
            for key, arrays in units:
                group = group_of(key)
                if (memory := self._connector.reserve(group, key)) is None:
                    num_dropped += not self._connector.match((key,))
                    continue
                for to, array in zip(memory, arrays, strict=True):
                    np.copyto(to, array)
                self._connector.save(Unit(group, key, memory))
                saved, num_bytes = saved + 1, num_bytes + self._bytes[group]
            self._count(
                num_saved=saved,
                saved_bytes=num_bytes,
                num_dropped=num_dropped,
                save_seconds=time.monotonic() - since,
            )

    def _loaded(self, ticket: int, units: list[Unit | None]) -> list[Event]:
        """Stage the units of a load, or report those that failed."""
        if ticket not in self._loads:
            self._connector.finished(ticket)
            return []
        load, _ = self._loads[ticket]
        found = [unit for unit in units if unit is not None]
        if len(found) == len(load.keys):
            self._staged[ticket] = self._mover.stage(found)
            return []
        failed = [key for key, unit in zip(load.keys, units, strict=True) if unit is None]
        self._count(num_failed=len(failed))
        self._forget(ticket)
        return [Loaded(ticket, tuple(failed))]

    def _forget(self, ticket: int) -> None:
        """Let the connector have the units of a load back, if it has not yet."""
        self._ready.pop(ticket, None)
        if self._loads.pop(ticket, None) is not None:
            self._staged.pop(ticket, None)
            self._connector.finished(ticket)

    def _num_bytes(self, keys: Sequence[bytes]) -> int:
        return sum(self._bytes[group_of(key)] for key in keys)

    def _count(self, **added: float) -> None:
        before = self._counters
        changes = {name: getattr(before, name) + value for name, value in added.items()}
        self._counters = msgspec.structs.replace(before, **changes)


def policy_of(forms: Forms, cost: CostModel, *, offloads: bool = False) -> TierPolicy:
    """The scheduler's policy for units of these forms; ``offloads``: see ``TierPolicy``."""
    pages = {group: form.num_bytes for group, form in forms.items() if group != SNAPSHOTS}
    state_bytes = forms[SNAPSHOTS].num_bytes if SNAPSHOTS in forms else 0
    unit_bytes = tuple(pages[group] for group in sorted(pages))
    return TierPolicy(cost, unit_bytes, state_bytes, offloads=offloads)
