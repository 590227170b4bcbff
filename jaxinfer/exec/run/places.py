"""Places on a board: entries of memory that a device writes or reads, each with a number."""

from __future__ import annotations

from itertools import cycle

import numpy as np

type Place = tuple[int, int, int]  # low and high half of an entry's address, and a number


class Places:
    """The entries of a board, used in turns by calls with numbers from 1 to ``largest``."""

    def __init__(self, address: int, entry_bytes: int, entries: int, largest: int) -> None:
        addresses = address + entry_bytes * np.arange(entries)
        self._halves: list[list[int]] = addresses.view(np.int32).reshape(-1, 2).tolist()
        self._numbers = cycle(range(1, largest + 1))

    def next(self) -> Place:
        """The place of the next call; its entry has the index number % entries."""
        number = next(self._numbers)
        low, high = self._halves[number % len(self._halves)]
        return low, high, number
