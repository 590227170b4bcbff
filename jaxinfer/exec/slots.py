"""Device-side state of each slot: its sampling parameters and the tokens it has seen.

Owns: ``SlotState`` and ``admit``, which fills slots as the scheduler gives them to requests.
Because the parameters live on the device, a step's batch names slots and nothing else; because the
tokens do, step n + 1 can start from step n's token before the host has read it.
Must not know: the model, pages, which request owns a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxinfer.core.step import SlotAdmission

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 16  # the user's, and room for the model's own eos ids


class SlotFloats(NamedTuple):
    """Columns of ``SlotState.floats``."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array


class SlotInts(NamedTuple):
    """Columns of ``SlotState.ints``; below ``min_length`` tokens no stop id is drawn."""

    seed_low: jax.Array
    seed_high: jax.Array
    top_k: jax.Array
    num_prompt_tokens: jax.Array
    min_length: jax.Array


class SlotState(NamedTuple):
    """One row per slot, and a last row that padding writes to and reads from."""

    floats: jax.Array  # float32[S + 1, len(SlotFloats)]
    ints: jax.Array  # int32[S + 1, len(SlotInts)]
    bias_ids: jax.Array  # int32[S + 1, MAX_LOGIT_BIAS]; V and above are dropped
    bias_values: jax.Array  # float32[S + 1, MAX_LOGIT_BIAS]
    stop_ids: jax.Array  # int32[S + 1, MAX_STOP_IDS]; V and above are dropped
    token_ids: jax.Array  # int32[S + 1, max_model_len + 1]: prompt, then what was drawn


class RowSections[A](NamedTuple):
    """The sections of what is sent of an admission, in order: as numpy views or device arrays.

    One array of int32 carries all, since each further one costs a transfer; floats are sent by
    their bits.
    """

    slot: A  # [A, 1]: its number
    ints: A  # [A, len(SlotInts)]
    floats: A  # [A, len(SlotFloats)]
    bias_ids: A  # [A, MAX_LOGIT_BIAS]
    bias_values: A  # [A, MAX_LOGIT_BIAS]
    stop_ids: A  # [A, MAX_STOP_IDS]
    token_ids: A  # [A, max_model_len + 1]


SECTION_SIZES = (  # of all but the last
    1,
    len(SlotInts._fields),
    len(SlotFloats._fields),
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
)
SECTION_STARTS = tuple(accumulate(SECTION_SIZES, initial=0))


def init_slots(max_num_seqs: int, max_model_len: int) -> SlotState:
    """A zeroed slot state."""
    rows = max_num_seqs + 1
    return SlotState(
        floats=jnp.zeros((rows, len(SlotFloats._fields)), jnp.float32),
        ints=jnp.zeros((rows, len(SlotInts._fields)), jnp.int32),
        bias_ids=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.zeros((rows, MAX_STOP_IDS), jnp.int32),
        token_ids=jnp.zeros((rows, max_model_len + 1), jnp.int32),
    )


def empty_rows(count: int, sink_slot: int, max_model_len: int) -> np.ndarray:  # int32[A, ...]
    """``count`` rows that nobody reads: they are the sink slot's. See ``RowSections``."""
    rows = np.zeros((count, SECTION_STARTS[-1] + max_model_len + 1), np.int32)
    _sections(rows).slot[:] = sink_slot
    return rows


def slot_rows(
    admissions: Sequence[SlotAdmission],
    count: int,
    *,
    sink_slot: int,
    vocab_size: int,
    max_model_len: int,
) -> np.ndarray:  # int32[A, ...]
    """``count`` rows as a host array: those of the admissions, then empty ones."""
    rows = empty_rows(count, sink_slot, max_model_len)
    sections = _sections(rows[: len(admissions)])
    sections.bias_ids[:] = vocab_size
    sections.stop_ids[:] = vocab_size
    for index, admission in enumerate(admissions):
        _fill(RowSections(*(section[index] for section in sections)), admission, max_model_len)
    return rows


def _fill(row: RowSections[np.ndarray], admission: SlotAdmission, max_model_len: int) -> None:
    request, sampling = admission.request, admission.request.sampling
    seed = request.seed & 0xFFFF_FFFF_FFFF_FFFF
    words = np.array([seed & 0xFFFF_FFFF, seed >> 32], np.uint32).view(np.int32)
    prompt = admission.num_prompt_tokens
    min_length = min(prompt + sampling.min_tokens, max_model_len + 1)
    row.slot[0] = admission.slot
    row.ints[:] = (*words, sampling.top_k, prompt, min_length)
    row.floats.view(np.float32)[:] = (
        0.0 if sampling.greedy else sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    if bias := sampling.logit_bias:
        row.bias_ids[: len(bias)] = list(bias)
        row.bias_values.view(np.float32)[: len(bias)] = list(bias.values())
    row.stop_ids[: len(request.stop_ids)] = request.stop_ids
    row.token_ids[: len(admission.token_ids)] = admission.token_ids.array()


def admit(slots: SlotState, rows: jax.Array) -> SlotState:  # int32[A, ...]: see ``RowSections``
    """The slot state with these rows in it. Compiled for few counts; ``slots`` is donated."""
    new = _sections(rows)
    floats, bias_values = (
        lax.bitcast_convert_type(bits, jnp.float32) for bits in (new.floats, new.bias_values)
    )
    values = SlotState(floats, new.ints, new.bias_ids, bias_values, new.stop_ids, new.token_ids)
    return jax.tree.map(lambda state, value: state.at[new.slot[:, 0]].set(value), slots, values)


def _sections[A: (np.ndarray, jax.Array)](rows: A) -> RowSections[A]:
    """The sections of rows; views where they are a numpy array."""
    ends = (*SECTION_STARTS[1:], rows.shape[1])
    return RowSections(*(rows[:, i:j] for i, j in zip(SECTION_STARTS, ends, strict=True)))
