"""``TierRunner``: does what the scheduler orders of tiers, and reports what has ended as events."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jaxinfer.core.connector import Connector, Content, Forms, Unit
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import Event
from jaxinfer.core.tiers import (
    SNAPSHOTS,
    CostModel,
    Load,
    Loaded,
    Saved,
    TierChanged,
    TierOrders,
    TierPolicy,
    TierStats,
    group_of,
)
from jaxinfer.exec.tiers.mover import Loading, PageMover, Saving

POLL_SECONDS = 50e-6  # between two looks at copies, while nothing else is to be done


class Save(NamedTuple):
    """Units that are copied to memory of the connector, where it has space, and since when."""

    copy: Saving
    memory: list[Content | None]
    since: float
    num_bytes: int  # of the device


class TierRunner:
    """Moves units between the device and a connector; on the engine's thread."""

    def __init__(
        self,
        mover: PageMover,
        connector: Connector,
        policy: TierPolicy,
        sizes: Callable[[], Mapping[str, float]] = dict,
        most_saving_bytes: int = 1 << 62,
    ) -> None:
        """``sizes``: the present values of ``TierStats``. ``most_saving_bytes``: of the device, for
        saves in flight; a larger one waits until it is alone.
        """
        self._most_saving_bytes, self._saving_bytes = most_saving_bytes, 0
        self._mover, self._connector, self._sizes = mover, connector, sizes
        self.policy = policy
        self._version = b""  # of the weights: see ``Connector.clear``
        self._bytes = {group: form.num_bytes for group, form in mover.forms.items()}
        self._gathers: deque[tuple[Saving, int]] = deque()  # not finished by the device; bytes
        self._saves: deque[Save] = deque()  # which are copied to the connector's memory
        self._num_ended = 0  # saves that ``poll`` has not reported
        self._loads: dict[int, tuple[Load, float]] = {}  # with the time of the order
        self._loading: dict[int, Loading] = {}  # those whose units the connector has brought
        self._counters = TierStats()

    @property
    def is_loading(self) -> bool:
        """True if a load has been ordered that has not been reported."""
        return bool(self._loads)

    @property
    def num_saving(self) -> int:
        """Calls whose saves have not been reported."""
        return len(self._gathers) + len(self._saves) + self._num_ended

    @property
    def num_held(self) -> int:
        """Loads whose units are kept, until they are on the device or dropped."""
        return len(self._loads)

    @property
    def is_shared(self) -> bool:
        """See ``Connector``."""
        return self._connector.is_shared

    def obey(self, orders: TierOrders) -> None:
        """Queue the copies of one call of the scheduler, before its step is launched."""
        for ticket in orders.dropped:
            self._forget(ticket)
        if orders.saves:
            size = self._mover.gathered_bytes(orders.saves)
            while self._saving_bytes and self._saving_bytes + size > self._most_saving_bytes:
                time.sleep(POLL_SECONDS)
                self._save_gathered()
            self._gathers.append((self._mover.gather(orders.saves), size))
            self._saving_bytes += size
        for load in orders.loads:
            self._loads[load.ticket] = load, time.monotonic()
            self._connector.load(load.ticket, load.keys)

    def look_up(self, keys: Sequence[bytes]) -> tuple[Event, ...]:
        """The event of units of a prompt that others have saved."""
        found = self._connector.match(keys)
        return (TierChanged(tuple(found)),) if found else ()

    def poll(self, seconds: float = 0.0) -> tuple[Event, ...]:
        """The events of copies that have ended; waits so long for the first of them."""
        end = time.monotonic() + seconds
        while not (events := self._polled(seconds)) and time.monotonic() < end:
            if self._moves:
                time.sleep(POLL_SECONDS)
        return events

    @property
    def _moves(self) -> bool:
        """True if the mover copies something."""
        return bool(self._loading or self._gathers or self._saves)

    def _polled(self, seconds: float) -> tuple[Event, ...]:
        """The same, once; the connector is waited for if nothing else is under way."""
        self._save_gathered()
        polled = self._connector.poll(0.0 if self._moves or self._num_ended else seconds)
        events: list[Event] = []
        if self._num_ended:
            events.append(Saved(self._num_ended))
            self._num_ended = 0
        if polled.added or polled.removed:
            changed = dict.fromkeys((*polled.added, *polled.removed))
            there = dict.fromkeys(self._connector.match(tuple(changed)))
            removed = tuple(key for key in changed if key not in there)
            events.append(TierChanged(tuple(there), removed))
        for ticket, units in polled.loaded.items():
            events += self._begun(ticket, units)
        for ticket in [ticket for ticket, loading in self._loading.items() if loading.advance()]:
            del self._loading[ticket]
            load, since = self._loads.pop(ticket)
            self._connector.finished(ticket)
            self._count(
                num_restored=len(load.units),
                restored_bytes=self._num_bytes(load.keys),
                restore_seconds=time.monotonic() - since,
            )
            events.append(Loaded(ticket))
        return tuple(events)

    def clear(self, *, weights_changed: bool) -> None:
        """Drop all units; no step is in flight."""
        self._gathers.clear()
        self._saves.clear()
        self._num_ended = self._saving_bytes = 0
        for ticket in tuple(self._loads):
            self._forget(ticket)
        self._mover.settle()  # the memory that they read and write belongs to others from now on
        if weights_changed:
            self._version = secrets.token_bytes(16)
        self._connector.clear(self._version)

    def settle(self) -> None:
        """Wait for copies under way, before the device's arrays are freed."""
        self._mover.settle()

    def close(self) -> None:
        """Save what has been copied, and end the connector's threads."""
        self.poll()
        self._mover.settle()
        self.poll()
        self._connector.close()

    def stats(self) -> TierStats:
        """Counters and present values."""
        return msgspec.structs.replace(self._counters, **self._sizes())

    def _save_gathered(self) -> None:
        """Copy units that the device has gathered, and save those that have been copied."""
        while self._gathers and self._gathers[0][0].is_ready:
            since, (gathered, size) = time.monotonic(), self._gathers.popleft()
            memory = [self._connector.reserve(group_of(key), key) for key in gathered.keys]
            gathered.copy_to(memory)
            self._saves.append(Save(gathered, memory, since, size))
        while self._saves and self._saves[0].copy.is_copied:
            save = self._saves.popleft()
            self._save(save)
            self._num_ended += 1
            self._saving_bytes -= save.num_bytes

    def _save(self, save: Save) -> None:
        saved = dropped = num_bytes = 0
        for key, memory in zip(save.copy.keys, save.memory, strict=True):
            if memory is None:
                dropped += not self._connector.match((key,))
                continue
            group = group_of(key)
            self._connector.save(Unit(group, key, memory))
            saved, num_bytes = saved + 1, num_bytes + self._bytes[group]
        self._count(
            num_saved=saved,
            saved_bytes=num_bytes,
            num_dropped=dropped,
            save_seconds=time.monotonic() - save.since,
        )

    def _begun(self, ticket: int, units: list[Unit | None]) -> list[Event]:
        """Begin to copy the units of a load to the device, or report those that failed."""
        if ticket not in self._loads:
            self._connector.finished(ticket)
            return []
        load, _ = self._loads[ticket]
        found = [unit for unit in units if unit is not None]
        if len(found) == len(load.units):
            self._loading[ticket] = self._mover.load(found, load.units)
            return []
        pairs = zip(load.keys, units, strict=True)
        failed = tuple([key for key, unit in pairs if unit is None])
        self._count(num_failed=len(failed))
        self._forget(ticket)
        return [Loaded(ticket, failed)]

    def _forget(self, ticket: int) -> None:
        """Stop a load, and let the connector have its units back."""
        if (loading := self._loading.pop(ticket, None)) is not None:
            loading.drop()
        if self._loads.pop(ticket, None) is not None:
            self._connector.finished(ticket)

    def _num_bytes(self, keys: Sequence[bytes]) -> int:
        return sum(self._bytes[group_of(key)] for key in keys)

    def _count(self, **added: float) -> None:
        before = self._counters
        changes = {name: getattr(before, name) + value for name, value in added.items()}
        self._counters = msgspec.structs.replace(before, **changes)


def policy_of(
    forms: Forms, limits: Limits, cost: CostModel, *, offloads: bool = False
) -> TierPolicy:
    """The scheduler's policy for units of these forms; ``offloads``: see ``TierPolicy``."""
    state_bytes = forms[SNAPSHOTS].num_bytes if SNAPSHOTS in forms else 0
    unit_bytes = tuple(forms[group].num_bytes for group in range(len(limits.groups)))
    unit_pools = tuple(group.pool for group in limits.groups)
    return TierPolicy(cost, unit_bytes, unit_pools, state_bytes, offloads=offloads)
