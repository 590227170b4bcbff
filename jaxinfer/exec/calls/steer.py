"""``STEER``: writes the steering of a request into its slot of a table for each point."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.points import Steering


def pack_steering(slot: int, values: bytes) -> np.ndarray:  # int32[1 + W of all points]
    """The argument of ``steered``: the slot, and the bits of its float32 values."""
    return np.concatenate((np.array([slot], np.int32), np.frombuffer(values, np.int32)))


def steered(steering: Steering, wire: jax.Array) -> Steering:  # int32[1 + W of all points]
    """The tables with the vectors of one slot: see ``pack_steering``. They are donated."""
    values = lax.bitcast_convert_type(wire[1:], jnp.float32)
    ends = np.cumsum([table.shape[1] for table in steering]).tolist()
    return tuple(
        table.at[wire[0]].set(values[end - table.shape[1] : end])
        for table, end in zip(steering, ends, strict=True)
    )


def tables(shape: EngineShape) -> Steering:
    """The abstract steering of slots, replicated; a table for each point."""
    rows, points = shape.limits.max_num_seqs + 1, shape.limits.points
    abstract = shape.placement.abstract
    return tuple(abstract((rows, point.width), jnp.float32) for point in points)  # type: ignore[misc]


def _padding(shape: EngineShape, size: int) -> tuple[np.ndarray]:
    del size
    values = bytes(4 * sum(point.width for point in shape.limits.points))
    return (pack_steering(shape.limits.max_num_seqs, values),)


def _pack(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    del shape
    for new in work.plan.admissions:
        if new.request.steering is not None:
            yield ((pack_steering(new.slot, new.request.steering.values),),)


STEER = Call(
    "steer",
    "before",
    lambda *_: steered,
    _padding,
    _pack,
    reads=("steer",),
    donates="steer",
    sizes=lambda shape: (0,) if shape.limits.points else (),
    owns=tables,
)
