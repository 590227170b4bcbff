"""Copies layer state between rows of its arrays: from a slot to a snapshot, and back.

The scheduler decides which rows are copied (``sched.snapshots``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import batched
from typing import NamedTuple

import jax
import numpy as np

type RowPair = tuple[int, int]  # from, to


class Copies(NamedTuple):
    """The pairs int32[2, N] of each copy call before and after a step."""

    restores: tuple[np.ndarray, ...] = ()  # before the step, to slots
    saves: tuple[np.ndarray, ...] = ()  # after it, to snapshots


NO_COPIES = Copies()


def copied(arrays: tuple[jax.Array, ...], pairs: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [rows, ...] in which rows ``pairs[0]`` are copied to rows ``pairs[1]``.

    ``pairs`` is int32[2, N]. All N rows are read before any is written. Compiled for one N;
    ``arrays`` are donated.
    """
    source, target = pairs
    return tuple(array.at[target].set(array[source]) for array in arrays)


def pack_copies(
    pairs: Iterable[RowPair], count: int, sink: int
) -> tuple[np.ndarray, ...]:  # int32[2, count] each
    """The arguments of the calls that copy ``pairs``; padding copies the sink to itself."""
    calls: list[np.ndarray] = []
    for some in batched(pairs, count):
        call = np.full((2, count), sink, np.int32)
        call[:, : len(some)] = np.array(some, np.int32).T
        calls.append(call)
    return tuple(calls)
