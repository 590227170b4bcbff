"""The bytes of requests that a server has received and that no handler has read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxinfer.core.host_memory import release_free_heap

UNCOUNTED_BYTES = 16384  # of each request: a short chat is accepted however much others send
TRIMMED_BYTES = 1 << 24  # the heap is trimmed after so many received bytes, counted or dropped
TRIM_SECONDS = 2.0  # from then to the trimming, and so between two


class BufferedBytes:
    """Counts the bytes of all connections of one server. Used in one event loop only."""

    def __init__(self, max_bytes: int, trim: Callable[[], None] = release_free_heap) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._received = 0  # since the heap was trimmed
        self._trim = trim
        self._timer: asyncio.TimerHandle | None = None

    def add(self, count: int) -> bool:
        """Count more bytes; False, without counting them, if they would be too many."""
        if self.num_bytes + count > self.max_bytes:
            return False
        self.num_bytes += count
        return True

    def remove(self, count: int) -> None:
        """Count fewer bytes."""
        self.num_bytes -= count

    def receive(self, count: int) -> None:
        """Note received bytes. After many of them the memory of those that are no longer held is
        returned to the system.
        """
        self._received += count
        if self._received >= TRIMMED_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim_heap)

    def _trim_heap(self) -> None:
        self._timer, self._received = None, 0
        self._trim()


class RequestBytes:
    """The bytes of one request, head and body, from their arrival until a handler has read them.

    ``refused``: they are too many together with those of other requests. ``discards``: no handler
    will read the rest.
    """

    def __init__(self, total: BufferedBytes, uncounted: int = UNCOUNTED_BYTES) -> None:
        self.refused = False
        self.discards = False
        self._total = total
        self._uncounted = uncounted
        self._num_bytes = 0
        self._counted = 0  # in the total

    @property
    def max_total(self) -> int:
        """The limit of all requests together."""
        return self._total.max_bytes

    def add(self, count: int) -> bool:
        """Count received bytes; False if they must be dropped."""
        if self.refused or self.discards:
            return False
        more = max(self._num_bytes + count - self._uncounted, 0) - self._counted
        if not self._total.add(more):
            self.discard()
            self.refused = True
            return False
        self._num_bytes += count
        self._counted += more
        return True

    def release(self) -> None:
        """A handler has read the bytes, or none will. Idempotent."""
        counted, self._counted, self._num_bytes = self._counted, 0, 0
        if counted:
            self._total.remove(counted)

    def discard(self) -> None:
        """No handler reads these bytes nor later ones."""
        self.discards = True
        self.release()
