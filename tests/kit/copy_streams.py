"""A stand-in of a GPU's copy streams: copies of memory that end late, in their order."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np

from jaxinfer.exec.run.copy_stream import HostCopy


class LateStream:
    """A ``CopyStream`` that copies nothing before its event has been asked for several times."""

    def __init__(self, num_looks: int = 3) -> None:
        self._num_looks = num_looks
        self._queue = deque[LateEvent]()
        self.num_copies = 0

    def to_device(self, copies: Sequence[HostCopy]) -> LateEvent:
        return self._queued([(one.device, one.host, one.size) for one in copies])

    def to_host(self, copies: Sequence[HostCopy]) -> LateEvent:
        return self._queued([(one.host, one.device, one.size) for one in copies])

    def wait(self) -> None:
        while self._queue:
            self._queue.popleft().end()

    def _queued(self, moves: list[tuple[int, int, int]]) -> LateEvent:
        self.num_copies += len(moves)
        self._queue.append(LateEvent(self, moves, self._num_looks))
        return self._queue[-1]

    def end_until(self, event: LateEvent) -> None:
        """Copy what is queued up to an event."""
        while not event.has_ended:
            self._queue.popleft().end()


class LateEvent:
    """The end of some copies."""

    def __init__(self, stream: LateStream, moves: list[tuple[int, int, int]], looks: int) -> None:
        self._stream, self._moves, self._looks = stream, moves, looks
        self.has_ended = False

    @property
    def is_done(self) -> bool:
        self._looks -= 1
        if self._looks <= 0:
            self._stream.end_until(self)
        return self.has_ended

    def end(self) -> None:
        for to, source, size in self._moves:
            ctypes.memmove(to, source, size)
        self.has_ended = True


def allocate(size: int) -> np.ndarray:  # uint8[size]
    """Memory in place of locked memory."""
    return np.zeros(size, np.uint8)
