"""Device-side state of each slot: its sampling parameters and the tokens it has seen.

Owns: ``SlotState`` and ``admit``, which fills slots as the scheduler gives them to requests.
Because the parameters live on the device, a step's batch names slots and nothing else; because the
tokens do, step n + 1 can start from step n's token before the host has read it.
Must not know: the model, pages, which request owns a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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


class SlotRows(NamedTuple):
    """What ``admit`` writes: A rows, each with its slot's number before the ints.

    ints: A, 1 + len(SlotInts) + MAX_LOGIT_BIAS + MAX_STOP_IDS + max_model_len + 1.
    """

    floats: np.ndarray  # float32[A, len(SlotFloats) + MAX_LOGIT_BIAS]
    ints: np.ndarray  # int32[A, ...]


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


def empty_rows(count: int, max_model_len: int) -> SlotRows:
    """``count`` rows of zeros."""
    floats = len(SlotFloats._fields) + MAX_LOGIT_BIAS
    ints = 1 + len(SlotInts._fields) + MAX_LOGIT_BIAS + MAX_STOP_IDS + max_model_len + 1
    return SlotRows(np.zeros((count, floats), np.float32), np.zeros((count, ints), np.int32))


def slot_rows(
    admissions: Sequence[SlotAdmission], *, vocab_size: int, max_model_len: int
) -> SlotRows:
    """The rows of these admissions, as host arrays."""
    rows = empty_rows(len(admissions), max_model_len)
    for index, admission in enumerate(admissions):
        _fill(rows.floats[index], rows.ints[index], admission, vocab_size, max_model_len)
    return rows


def _fill(
    floats: np.ndarray,  # float32[...]: see ``SlotRows``
    ints: np.ndarray,  # int32[...]
    admission: SlotAdmission,
    vocab_size: int,
    max_model_len: int,
) -> None:
    request, sampling = admission.request, admission.request.sampling
    bias = sampling.logit_bias or {}
    seed = request.seed & 0xFFFF_FFFF_FFFF_FFFF
    words = np.array([seed & 0xFFFF_FFFF, seed >> 32], np.uint32).view(np.int32)
    prompt = admission.num_prompt_tokens
    min_length = min(prompt + sampling.min_tokens, max_model_len + 1)
    columns, bias_values = np.split(floats, [len(SlotFloats._fields)])
    columns[:] = (
        0.0 if sampling.greedy else sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    bias_values[: len(bias)] = list(bias.values())
    ends = np.cumsum([1 + len(SlotInts._fields), MAX_LOGIT_BIAS, MAX_STOP_IDS])
    columns, bias_ids, stop_ids, tokens = np.split(ints, ends)
    columns[:] = (admission.slot, *words, sampling.top_k, prompt, min_length)
    bias_ids[:] = vocab_size
    bias_ids[: len(bias)] = list(bias)
    stop_ids[:] = vocab_size
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    tokens[: len(admission.token_ids)] = admission.token_ids.array()


def admit(slots: SlotState, rows: SlotRows) -> SlotState:
    """The slot state with these rows in it. Compiled for few counts; ``slots`` is donated."""
    ints = jnp.asarray(rows.ints)
    ends = np.cumsum([1, len(SlotInts._fields), MAX_LOGIT_BIAS, MAX_STOP_IDS])
    slot, columns, bias_ids, stop_ids, tokens = jnp.split(ints, ends, axis=1)
    floats, bias_values = jnp.split(jnp.asarray(rows.floats), [len(SlotFloats._fields)], axis=1)
    new = SlotState(floats, columns, bias_ids, bias_values, stop_ids, tokens)
    return jax.tree.map(lambda state, values: state.at[slot[:, 0]].set(values), slots, new)
