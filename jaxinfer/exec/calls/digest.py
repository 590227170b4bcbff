"""``DIGEST``: 32 bits of the input of each row's draw, with which recordings compare steps.

A token tells little of the values that it was drawn from; these change with any bit of them. Only
engines with ``Limits.digests`` have the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.shapes import ladder
from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.slots import SlotState

ROWS_FACTOR = 4  # ratio of the numbers of rows of successive executables
# of Knuth's multiplicative hashing; made odd for each place, a change of one value changes the sum
_GOLDEN = 0x9E37_79B1


def digests(slots: SlotState, rows: jax.Array) -> jax.Array:  # int32[N] -> uint32[N]
    """For each slot the sum modulo 2^32 of its ``drawn_from`` as integers, each times an odd
    number of its own.
    """
    values = slots.drawn_from[rows]  # [N, D]
    kind = jnp.uint16 if values.dtype.itemsize == 2 else jnp.uint32
    bits = lax.bitcast_convert_type(values, kind).astype(jnp.uint32)
    places = jnp.arange(bits.shape[1], dtype=jnp.uint32)
    return (bits * (places * jnp.uint32(_GOLDEN) | jnp.uint32(1))).sum(1, dtype=jnp.uint32)


def _sizes(shape: EngineShape) -> tuple[int, ...]:
    if not shape.limits.digests:
        return ()
    return ladder(1, max(bucket.num_seqs for bucket in shape.limits.buckets), ROWS_FACTOR)


def _padding(shape: EngineShape, size: int) -> tuple[Any, ...]:
    return (np.full(size, shape.limits.max_num_seqs, np.int32),)


def _pack(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    slots = [row.slot for row in work.plan.rows]
    size = next(size for size in _sizes(shape) if size >= len(slots))
    (rows,) = _padding(shape, size)
    rows[: len(slots)] = slots
    yield (rows,), size


DIGEST = Call(
    "digest",
    "after",
    lambda _, __: digests,
    _padding,
    _pack,
    reads=("slots",),
    has_result=True,
    sizes=_sizes,
    is_for_decodes=True,
)
