"""Executables beside the step that the library does not contain, as a family may bring them.

``TALLY`` counts in an array of its own how many tokens each slot has computed. ``FORGET`` makes the
layer state of a slot that is admitted without a snapshot wrong: no sequence may read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.nn.state import StateLayout

WRONG = 77  # not NaN: the last slot is that of padding, whose values are multiplied by zero


def count(counts: jax.Array, added: jax.Array) -> tuple[jax.Array, jax.Array]:  # int32[S + 1] each
    """The counts with the tokens of a step added, and their sum."""
    counts = counts + added
    return counts, counts.sum()


def make_count(shape: EngineShape, size: int) -> Callable[..., Any]:
    del shape, size
    return count


def no_tokens(shape: EngineShape, size: int) -> tuple[np.ndarray]:
    del size
    return (np.zeros(shape.limits.max_num_seqs + 1, np.int32),)


def tokens_of_slots(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    (added,) = no_tokens(shape, 0)
    for row in work.plan.rows:
        added[row.slot] += row.num_scheduled_tokens
    yield ((added,),)


def counts_of_slots(shape: EngineShape) -> jax.ShapeDtypeStruct:
    return shape.placement.abstract((shape.limits.max_num_seqs + 1,), jnp.int32)


def one_megabyte(shape: EngineShape, size: int) -> int:
    del shape, size
    return 1_000_000


TALLY = Call(
    "tally",
    "after",
    make_count,
    no_tokens,
    tokens_of_slots,
    reads=("tally",),
    donates="tally",
    has_result=True,
    owns=counts_of_slots,
    is_for_decodes=True,
    workspace=one_megabyte,
)


def spoil(arrays: tuple[jax.Array, ...], slots: jax.Array) -> tuple[jax.Array, ...]:  # int32[N]
    """The layer state of sequences, with other values in these slots."""
    return tuple(array.at[slots].set(WRONG) for array in arrays)


def make_spoil(shape: EngineShape, size: int) -> Callable[..., Any]:
    del shape, size
    return spoil


def admitted_slots(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    admitted = [new.slot for new in work.plan.admissions]
    size = next(n for n in two_sizes(shape) if n >= len(admitted))
    (slots,) = sinks(shape, size)
    slots[: len(admitted)] = admitted
    yield (slots,), size


def sinks(shape: EngineShape, size: int) -> tuple[np.ndarray]:
    return (np.full(size, shape.limits.max_num_seqs, np.int32),)


def two_sizes(shape: EngineShape) -> tuple[int, ...]:
    return (1, shape.limits.max_num_seqs) if shape.model.state.bytes_per_slot else ()


def state_of_slots(layout: StateLayout) -> tuple[int, ...]:
    return tuple(i for i, pool in enumerate(layout.pools) if pool is None)


FORGET = Call(
    "forget",
    "before",
    make_spoil,
    sinks,
    admitted_slots,
    reads=("state",),
    donates="state",
    sizes=two_sizes,
    state_arrays=state_of_slots,
)
