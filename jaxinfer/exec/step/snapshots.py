"""Copies of layer state between the rows of its arrays: a slot's to a snapshot, and back.

Owns: the executable's function, and its argument as the host makes it. Which rows are copied when
is the scheduler's business (``sched.snapshots``).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import batched
from typing import NamedTuple

import jax
import numpy as np

type RowPair = tuple[int, int]  # from, to


class Copies(NamedTuple):
    """The calls around a step, each with its pairs int32[2, N]."""

    restores: tuple[np.ndarray, ...] = ()  # before the step, to slots
    saves: tuple[np.ndarray, ...] = ()  # after it, to snapshots


NO_COPIES = Copies()


def copied(arrays: tuple[jax.Array, ...], pairs: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [rows, ...] in which rows ``pairs[0]`` are copied to rows ``pairs[1]``.

    ``pairs`` is int32[2, N]. All N rows are read before one is written. Compiled for one N;
    ``arrays`` are donated.
    """
    source, target = pairs
    return tuple(array.at[target].set(array[source]) for array in arrays)


def pack_copies(
    pairs: Iterable[RowPair], count: int, sink: int
) -> tuple[np.ndarray, ...]:  # int32[2, count] each
    """The arguments of as many calls as ``pairs`` need; padding copies the sink to itself."""
    calls: list[np.ndarray] = []
    for some in batched(pairs, count):
        call = np.full((2, count), sink, np.int32)
        call[:, : len(some)] = np.array(some, np.int32).T
        calls.append(call)
    return tuple(calls)
