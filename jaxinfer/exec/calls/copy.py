"""``RESTORE`` and ``SAVE``: copy layer state from snapshots to slots, and back after the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.slots import copied, pack_copies

ROWS = 4  # that a call copies on a GPU; padding is copied too, and a row may be tens of MB


def rows_per_call(shape: EngineShape) -> int:
    """The number of rows that a call copies."""
    return 1 if shape.platform == "cpu" else ROWS


def _calls(
    shape: EngineShape, pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[tuple[np.ndarray]]]:
    """The arguments of the calls for pairs of rows (from, to)."""
    for packed in pack_copies(pairs, rows_per_call(shape), shape.limits.max_num_seqs):
        yield ((packed,),)


def _padding(shape: EngineShape, size: int) -> tuple[np.ndarray]:
    del size
    sink = shape.limits.max_num_seqs
    return next(_calls(shape, [(sink, sink)]))[0]


def _restores(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    first = shape.limits.max_num_seqs + 1  # the row of the first snapshot
    admissions = work.plan.admissions
    pairs = [(first + a.snapshot, a.slot) for a in admissions if a.snapshot is not None]
    return _calls(shape, pairs)


def _saves(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    first = shape.limits.max_num_seqs + 1
    rows = work.plan.prefills
    return _calls(shape, [(r.slot, first + r.snapshot) for r in rows if r.snapshot is not None])


RESTORE = Call(
    "copy",
    "before",
    lambda *_: copied,
    _padding,
    _restores,
    reads=("state",),
    donates="state",
    sizes=lambda shape: (0,) if shape.limits.num_snapshots else (),
    state_arrays=lambda layout: layout.slot_arrays,
    workspace=lambda shape, _: rows_per_call(shape) * shape.model.state.bytes_per_slot,
)
SAVE = replace(RESTORE, when="after", pack=_saves)
