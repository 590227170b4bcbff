"""``UnitLayout``: where the arrays of a unit are, as the kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

WORD = np.dtype(np.int32)
PIECE_WORDS = 8192  # of a row that a CTA copies at most; 32 KB
COLUMNS = 6  # of a table: see ``UnitLayout.table``


@dataclass(frozen=True)
class UnitLayout:
    """The arrays of a unit. ``row_words``: the 32-bit words of a row of each."""

    row_words: tuple[int, ...]

    @property
    def unit_words(self) -> int:
        """The words of a unit."""
        return sum(self.row_words)

    @cached_property
    def pieces(self) -> tuple[tuple[int, int, int, int], ...]:
        """A piece for each CTA: its array, where it is in its row and in the unit, its words."""
        found, at = list[tuple[int, int, int, int]](), 0
        for array, words in enumerate(self.row_words):
            for start in range(0, words, PIECE_WORDS):
                found.append((array, start, at + start, min(PIECE_WORDS, words - start)))
            at += words
        return tuple(found)

    def table(self, addresses: Sequence[int]) -> np.ndarray:  # int32[pieces * COLUMNS]
        """The pieces as the kernels read them: the two halves of the array's address, the words of
        its rows, where the piece begins in its row and in the unit, and its words.
        """
        rows = [
            (*_halves(addresses[array]), self.row_words[array], *rest)
            for array, *rest in self.pieces
        ]
        return np.array(rows, np.uint32).reshape(-1).view(np.int32)


def _halves(address: int) -> tuple[int, int]:
    return address & 0xFFFFFFFF, address >> 32
