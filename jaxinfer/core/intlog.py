"""An append-only list of ints as an immutable value: the token ids and page ids of a sequence.

An ``IntLog`` is a view of the first ``len`` entries of a shared buffer. Appending to the longest
view costs amortised O(1); appending to a shorter one copies the entries first. So every view
behaves as a frozen tuple.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import final, overload

import numpy as np


@final
class IntLog(Sequence[int]):
    """An immutable sequence of int32 with cheap ``extend`` and zero-copy numpy views.

    ``IntLog(log)`` is an equal log that shares the buffer.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: Iterable[int] = ()) -> None:
        if type(values) is IntLog:  # a final class; isinstance of an ABC is 5 times slower
            self._buffer, self._length = values._buffer, values._length
            return
        self._buffer = _Buffer(_int32(values))
        self._length = self._buffer.used

    def extend(self, values: Iterable[int]) -> IntLog:
        """This log followed by ``values``; this log itself is unchanged."""
        added = _int32(values)
        if not len(added):
            return self
        if not self._length:  # nothing to share: the buffer of an empty log stays small
            return self._view(_Buffer(added), len(added))
        buffer = self._buffer
        if buffer.used != self._length:  # a longer view exists: copy instead of overwriting it
            buffer = _Buffer(self.array().copy())
        buffer.append(added)
        return self._view(buffer, self._length + len(added))

    def append(self, value: int) -> IntLog:
        """This log followed by one value."""
        buffer, length = self._buffer, self._length
        if buffer.used != length or length == len(buffer.data):
            return self.extend([value])
        buffer.data[length] = value  # the common case, once per generated token
        buffer.used = length + 1
        return self._view(buffer, length + 1)

    def array(self) -> np.ndarray:
        """The entries as a read-only int32 array; no copy is made."""
        return self._buffer.readable[: self._length]

    @classmethod
    def _view(cls, buffer: _Buffer, length: int) -> IntLog:
        log = cls.__new__(cls)
        log._buffer = buffer
        log._length = length
        return log

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return self.array()[index].tolist()
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return int(self._buffer.data[index % self._length])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array().tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntLog) and np.array_equal(self.array(), other.array())

    def __hash__(self) -> int:
        return hash(self.array().tobytes())

    def __repr__(self) -> str:
        return f"IntLog({self.array().tolist()})"


class _Buffer:
    """Growing storage, full at first. ``used`` is the length of the longest view; ``readable`` is a
    read-only view of ``data``.
    """

    __slots__ = ("data", "readable", "used")

    def __init__(self, data: np.ndarray) -> None:
        data.setflags(write=False)  # it is full: nothing is written before it grows
        self.data = self.readable = data
        self.used = len(data)

    def append(self, added: np.ndarray) -> None:
        end = self.used + len(added)
        if end > len(self.data):
            grown = np.empty(max(end, 2 * len(self.data), 16), np.int32)
            grown[: self.used] = self.data[: self.used]
            self.data, self.readable = grown, grown.view()
            self.readable.setflags(write=False)
        self.data[self.used : end] = added
        self.used = end


def _int32(values: Iterable[int]) -> np.ndarray:
    """A private int32 copy; raises ``OverflowError`` for an integer beyond int32."""
    if isinstance(values, np.ndarray):
        return np.array(values, np.int32)
    if isinstance(values, (tuple, list)):  # a prompt: struct takes two thirds of numpy's time
        try:
            return np.frombuffer(struct.pack(f"{len(values)}i", *values), np.int32)
        except struct.error:
            return np.fromiter(values, np.int32)  # converts other types, or raises a clear error
    return np.fromiter(values, np.int32)
