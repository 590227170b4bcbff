"""``Guarded``: a connector of the user's, whose faults do not end the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from jaxinfer.core.connector import Connector, Content, Polled, Unit

LOGGER = "jaxinfer.tiers"
METHODS = ("match", "reserve", "save", "load", "poll", "finished", "clear", "close")
LOAD_SECONDS = 30.0  # for which a load may take; then its units are computed
IDLE_SECONDS = 1e-3  # between two looks at a store that is not used any more


class Guarded:
    """The same connector until one of its methods raises; from then on one without units.

    There is one warning, with the traceback. Loads in flight fail, so their units are computed.
    After an error of ``clear`` it may have units of other weights, hence it is not used again. A
    load that takes longer than ``load_seconds`` fails as well.
    """

    def __init__(self, own: Connector, name: str, load_seconds: float = LOAD_SECONDS) -> None:
        self.is_shared = own.is_shared
        self._own: Connector | None = own
        self._name, self._load_seconds = name, load_seconds
        self._loads: dict[int, tuple[Sequence[bytes], float]] = {}  # in flight, and since when
        self._saves: dict[bytes, Unit] = {}  # whose content is still read
        self._polled = Polled()  # what the next call of ``poll`` reports besides

    def match(self, keys: Sequence[bytes]) -> list[bytes]:
        """See ``Connector``."""
        return self._call(lambda own: own.match(keys), [])

    def reserve(self, group: int, key: bytes) -> Content | None:
        """See ``Connector``."""
        return self._call(lambda own: own.reserve(group, key), None)

    def save(self, unit: Unit) -> bool:
        """See ``Connector``."""
        if kept := self._call(lambda own: own.save(unit), default=False):
            self._saves[unit.key] = unit
        return kept

    def load(self, ticket: int, keys: Sequence[bytes]) -> None:
        """See ``Connector``."""
        self._loads[ticket] = keys, time.monotonic()
        self._call(lambda own: own.load(ticket, keys), None)
        if self._own is None and ticket in self._loads:
            self._fail_load(ticket)

    def poll(self, seconds: float = 0.0) -> Polled:
        """See ``Connector``."""
        if self._own is None and seconds and not self._polled:
            time.sleep(min(seconds, IDLE_SECONDS))
        found = self._call(lambda own: own.poll(seconds), Polled())
        for unit in found.saved:
            self._saves.pop(unit.key, None)
        for ticket in found.loaded:
            self._loads.pop(ticket, None)
        latest = time.monotonic() - self._load_seconds
        for ticket in [ticket for ticket, (_, since) in self._loads.items() if since < latest]:
            words = "kv_connector %s brought nothing in %g s: its pages are computed"
            logging.getLogger(LOGGER).warning(words, self._name, self._load_seconds)
            self._fail_load(ticket)
        own, self._polled = self._polled, Polled()
        found.saved += own.saved
        found.loaded |= own.loaded
        return found

    def finished(self, ticket: int) -> None:
        """See ``Connector``."""
        self._loads.pop(ticket, None)
        self._polled.loaded.pop(ticket, None)
        self._call(lambda own: own.finished(ticket), None)

    def clear(self, version: bytes) -> None:
        """See ``Connector``."""
        self._saves.clear()
        self._polled = Polled(loaded=self._polled.loaded)
        self._call(lambda own: own.clear(version), None)

    def close(self) -> None:
        """See ``Connector``."""
        self._call(lambda own: own.close(), None)

    def _call[T](self, method: Callable[[Connector], T], default: T) -> T:
        """The result of a method, or ``default`` if one raises or has raised before."""
        if self._own is None:
            return default
        try:
            return method(self._own)
        except Exception as error:
            words = "kv_connector %s has failed (%s: %s); the engine goes on without it"
            kind = type(error).__name__
            logging.getLogger(LOGGER).warning(words, self._name, kind, error, exc_info=error)
            self._own = None
            for ticket in tuple(self._loads):
                self._fail_load(ticket)
            self._polled.saved += self._saves.values()
            self._saves.clear()
            return default

    def _fail_load(self, ticket: int) -> None:
        keys, _ = self._loads.pop(ticket)
        self._polled.loaded[ticket] = [None] * len(keys)
