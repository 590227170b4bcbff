"""Device-side state of each slot: its sampling parameters and the tokens it has seen.

Owns: ``SlotState`` and ``admit``, which fills a slot when the scheduler gives it to a request.
Because the parameters live on the device, a step's batch names slots and nothing else; because the
tokens do, step n + 1 can start from step n's token before the host has read it.
Must not know: the model, pages, which request owns a slot.
"""

from __future__ import annotations

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


class SlotRow(NamedTuple):
    """What ``admit`` writes: the row of one slot, with the slot's number before the ints."""

    floats: np.ndarray  # float32[len(SlotFloats) + MAX_LOGIT_BIAS]
    ints: np.ndarray  # int32[1 + len(SlotInts) + MAX_LOGIT_BIAS + MAX_STOP_IDS + max_model_len + 1]


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


def empty_row(max_model_len: int) -> SlotRow:
    """The shapes of one admission."""
    floats = len(SlotFloats._fields) + MAX_LOGIT_BIAS
    ints = 1 + len(SlotInts._fields) + MAX_LOGIT_BIAS + MAX_STOP_IDS + max_model_len + 1
    return SlotRow(np.zeros(floats, np.float32), np.zeros(ints, np.int32))


def slot_row(admission: SlotAdmission, vocab_size: int, max_model_len: int) -> SlotRow:
    """The row of one admission as host arrays."""
    request, sampling = admission.request, admission.request.sampling
    bias = sampling.logit_bias or {}
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    bias_ids[: len(bias)] = list(bias)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_values[: len(bias)] = list(bias.values())
    stop_ids = np.full(MAX_STOP_IDS, vocab_size, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    tokens = np.zeros(max_model_len + 1, np.int32)
    tokens[: len(admission.token_ids)] = admission.token_ids.array()
    floats = (
        0.0 if sampling.greedy else sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    seed = request.seed & 0xFFFF_FFFF_FFFF_FFFF
    words = np.array([seed & 0xFFFF_FFFF, seed >> 32], np.uint32).view(np.int32)
    prompt = admission.num_prompt_tokens
    min_length = min(prompt + sampling.min_tokens, max_model_len + 1)
    ints = (admission.slot, *words, sampling.top_k, prompt, min_length)
    return SlotRow(
        floats=np.concatenate([np.array(floats, np.float32), bias_values]),
        ints=np.concatenate([np.array(ints, np.int32), bias_ids, stop_ids, tokens]),
    )


def admit(slots: SlotState, row: SlotRow) -> SlotState:
    """The slot state with one row replaced. Compiled once; ``slots`` is donated."""
    slot, ints = row.ints[0], jnp.asarray(row.ints[1:])
    columns, rest = jnp.split(ints, [len(SlotInts._fields)])
    bias_ids, stop_ids, tokens = jnp.split(rest, [MAX_LOGIT_BIAS, MAX_LOGIT_BIAS + MAX_STOP_IDS])
    floats, bias_values = jnp.split(jnp.asarray(row.floats), [len(SlotFloats._fields)])
    new = SlotState(floats, columns, bias_ids, bias_values, stop_ids, tokens)
    return jax.tree.map(lambda state, value: state.at[slot].set(value), slots, new)
