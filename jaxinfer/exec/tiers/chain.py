"""``Chain``: a connector of two, such as host memory and a disk behind it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.core.connector import Connector, Content, Polled, Unit

MOST_COPIES = 16  # units of the upper connector that are kept as the lower one copies them
CLOSE_SECONDS = 5.0  # for which ``close`` lets the lower one copy units


@dataclass
class Parts:
    """A load of some keys, and those that each connector still loads: the upper, the lower one."""

    keys: Sequence[bytes]
    awaited: dict[bool, Sequence[bytes]]
    found: dict[bytes, Unit | None]


class Chain:
    """Units are saved in the upper connector, and copied to the lower one at its pace.

    While the lower one copies a unit it is kept by a load, whose ticket is negative. A unit that
    the upper one replaces before its turn is not in the lower one.
    """

    def __init__(self, upper: Connector, lower: Connector) -> None:
        self._upper, self._lower = upper, lower
        self._loads: dict[int, Parts] = {}
        self._waiting: OrderedDict[bytes, None] = OrderedDict()  # keys that are to be copied
        self._copying: dict[bytes, int] = {}  # the ticket of each
        self._last_ticket = 0  # of these

    @property
    def is_shared(self) -> bool:
        """See ``Connector``."""
        return self._upper.is_shared or self._lower.is_shared

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        """See ``Connector``."""
        there = {*self._upper.match(keys)}
        there.update(self._lower.match([key for key in keys if key not in there]))
        return [key for key in keys if key in there]

    def reserve(self, group: int, key: bytes) -> Content | None:
        """See ``Connector``."""
        return self._upper.reserve(group, key)

    def save(self, unit: Unit) -> bool:
        """See ``Connector``."""
        if not self._upper.save(unit):
            return False
        self._waiting[unit.key] = None
        return True

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        """See ``Connector``."""
        upper = self._upper.match(keys)
        lower = [key for key in keys if key not in {*upper}]
        parts = self._loads[ticket] = Parts(keys, {}, {})
        for is_lower, own, connector in ((False, upper, self._upper), (True, lower, self._lower)):
            if own:
                parts.awaited[is_lower] = own
                connector.load(ticket, own)

    def poll(self, seconds: float = 0.0) -> Polled:
        """See ``Connector``."""
        self._begin_copies()
        found = self._merged(Polled(), self._upper.poll(), is_lower=False)
        return self._merged(found, self._lower.poll(0.0 if found else seconds), is_lower=True)

    def finished(self, ticket: int) -> None:
        """See ``Connector``."""
        self._loads.pop(ticket, None)
        self._upper.finished(ticket)
        self._lower.finished(ticket)

    def clear(self, version: bytes) -> None:
        """See ``Connector``."""
        self._lower.clear(version)
        self._upper.clear(version)
        for ticket in self._copying.values():
            self._upper.finished(ticket)
        self._copying.clear()
        self._waiting.clear()

    def close(self) -> None:
        """See ``Connector``: units are copied for some seconds more."""
        end = time.monotonic() + CLOSE_SECONDS
        while (self._waiting or self._copying) and time.monotonic() < end:
            self.poll(0.01)
        self._upper.close()
        self._lower.close()

    def _begin_copies(self) -> None:
        """Load units from the upper connector, which the lower one will copy."""
        while self._waiting and len(self._copying) < MOST_COPIES:
            key, _ = self._waiting.popitem(last=False)
            if key not in self._copying and not self._lower.match((key,)):
                self._last_ticket -= 1
                self._copying[key] = self._last_ticket
                self._upper.load(self._last_ticket, (key,))

    def _copy(self, ticket: int, unit: Unit | None) -> None:
        """Let the lower connector copy a unit that has been loaded."""
        if unit is not None and self._copying.get(unit.key) == ticket and self._lower.save(unit):
            return
        self._upper.finished(ticket)
        for key in [key for key, own in self._copying.items() if own == ticket]:
            del self._copying[key]

    def _merged(self, into: Polled, own: Polled, *, is_lower: bool) -> Polled:
        """``into`` with the changes of one of the connectors."""
        into.added += own.added
        into.removed += own.removed
        if is_lower:
            for unit in own.saved:
                if (ticket := self._copying.pop(unit.key, None)) is not None:
                    self._upper.finished(ticket)
        else:
            into.saved += own.saved
        for ticket, units in own.loaded.items():
            if ticket < 0:
                self._copy(ticket, units[0])
            elif (parts := self._loads.get(ticket)) is not None:
                parts.found |= dict(zip(parts.awaited.pop(is_lower), units, strict=True))
                if not parts.awaited:
                    into.loaded[ticket] = [parts.found[key] for key in parts.keys]
        return into
