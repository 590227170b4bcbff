"""``ADMIT``: writes what extras read besides settings into the slots of requests that have some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, batched
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.request import Request
from jaxinfer.core.sampling_checks import MAX_LOGIT_BIAS
from jaxinfer.core.step import SlotAdmission
from jaxinfer.exec.calls.call import Call, Work
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.exec.step.slots import MAX_STOP_IDS, SlotState

ROWS = 8  # slots that a call fills on a GPU: a launch takes longer than a call


class RowSections[A](NamedTuple):
    """The sections of the rows of admissions, in order: as numpy views or device arrays.

    All are in one int32 array, since each array costs a transfer; floats are sent as bits.
    """

    slot: A  # [A, 1]: the slot's number
    bias_ids: A  # [A, MAX_LOGIT_BIAS]
    bias_values: A  # [A, MAX_LOGIT_BIAS]
    stop_ids: A  # [A, MAX_STOP_IDS]
    token_ids: A  # [A, max_model_len + 1]


SECTION_SIZES = (1, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_STOP_IDS)  # of all but the last
SECTION_STARTS = tuple(accumulate(SECTION_SIZES, initial=0))


def needs_admission(request: Request) -> bool:
    """True if extras of this request read more of its slot than settings and drawn tokens."""
    sampling = request.sampling
    return bool(sampling.logit_bias or sampling.min_tokens or sampling.has_penalties)


def empty_rows(count: int, sink_slot: int, max_model_len: int) -> np.ndarray:  # int32[A, ...]
    """``count`` rows of padding, for the sink slot: see ``RowSections``."""
    rows = np.zeros((count, SECTION_STARTS[-1] + max_model_len + 1), np.int32)
    _sections(rows).slot[:] = sink_slot
    return rows


def slot_rows(
    admissions: Sequence[SlotAdmission],
    rows: np.ndarray,  # int32[A, ...]: see ``empty_rows``
    vocab_size: int,
) -> np.ndarray:  # int32[A, ...]
    """``rows`` with the admissions in the first ones."""
    sections = _sections(rows)
    sections.stop_ids[: len(admissions)] = vocab_size
    for index, admission in enumerate(admissions):
        row = RowSections(*(section[index] for section in sections))
        request, known = admission.request, admission.token_ids
        row.slot[0] = admission.slot
        if bias := request.sampling.logit_bias:
            row.bias_ids[: len(bias)] = list(bias)
            row.bias_values.view(np.float32)[: len(bias)] = list(bias.values())
        row.stop_ids[: len(request.stop_ids)] = request.stop_ids
        row.token_ids[: len(known)] = known.array()
    return rows


def admit(slots: SlotState, rows: jax.Array) -> SlotState:  # int32[A, ...]: see ``RowSections``
    """The slot state with these rows. Compiled for few counts; ``slots`` is donated."""
    new = _sections(rows)
    at = new.slot[:, 0]
    bias_values = lax.bitcast_convert_type(new.bias_values, jnp.float32)
    return slots._replace(
        bias_ids=slots.bias_ids.at[at].set(new.bias_ids),
        bias_values=slots.bias_values.at[at].set(bias_values),
        stop_ids=slots.stop_ids.at[at].set(new.stop_ids),
        token_ids=slots.token_ids.at[at].set(new.token_ids),
    )


def _sections[A: (np.ndarray, jax.Array)](rows: A) -> RowSections[A]:
    """The sections of rows; they are views of a numpy array."""
    ends = (*SECTION_STARTS[1:], rows.shape[1])
    return RowSections(*(rows[:, i:j] for i, j in zip(SECTION_STARTS, ends, strict=True)))


def rows_per_call(shape: EngineShape) -> int:
    """The number of slots that a call fills."""
    return 1 if shape.platform == "cpu" else ROWS


def _rows(shape: EngineShape, admissions: Sequence[SlotAdmission]) -> np.ndarray:  # int32[A, ...]
    limits = shape.limits
    empty = empty_rows(rows_per_call(shape), limits.max_num_seqs, limits.max_model_len)
    return slot_rows(admissions, empty, shape.model.config.vocab_size)


def _pack(shape: EngineShape, work: Work) -> Iterator[tuple[Any, ...]]:
    drafts = shape.drafter is not None  # a drafter reads all known tokens
    needed = [a for a in work.plan.admissions if drafts or needs_admission(a.request)]
    for some in batched(needed, rows_per_call(shape)):
        yield ((_rows(shape, some),),)


ADMIT = Call(
    "admit",
    "before",
    lambda *_: admit,
    lambda shape, _: (_rows(shape, ()),),
    _pack,
    reads=("slots",),
    donates="slots",
)
