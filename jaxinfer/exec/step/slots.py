"""The state of each slot on the device: sampling settings, drawn tokens, and the data of extras.

Every draw reads the settings. They are small: the batch of a prompt step contains them, and the
step writes them (``forward``). The data that only extras read is large and rarely needed:
logit_bias, stop ids and all known tokens. ``exec.calls.admit`` writes it when a request with such
extras gets a slot. Other slots keep the data of an earlier request, and their settings switch it
off. The input of each draw is also stored, for an executable that draws again with extras. With all
this on the device, the batch contains no more than the slot and page table of a decode row, and
step n + 1 can read the token of step n before the host does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.request import Request
from jaxinfer.core.sampling_checks import INT32_MAX, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxinfer.nn.state import LayerArrays, LayerState

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 16  # the user's stop ids and up to 16 eos ids of the model


class SlotInts[A](NamedTuple):
    """The first columns of ``SlotState.settings``.

    Below ``min_length`` tokens no stop id is drawn. ``num_biases`` is the number of valid entries
    of the slot's logit_bias. If it is 0, ``min_length`` is the prompt's length and the penalties
    change nothing, no data of extras is used.
    """

    seed_low: A
    seed_high: A
    top_k: A
    num_prompt_tokens: A
    min_length: A
    num_biases: A


class SlotFloats[A](NamedTuple):
    """The other columns of ``SlotState.settings``, as float32 bits."""

    # 0: greedy; negative: greedy in the step, and draws with extras take the absolute value
    temperature: A
    top_p: A
    min_p: A
    presence_penalty: A
    frequency_penalty: A
    repetition_penalty: A
    logprobs_temperature: A  # logprobs are of logits divided by it; 0: of unmodified logits


NUM_INTS = len(SlotInts._fields)
NUM_SETTINGS = NUM_INTS + len(SlotFloats._fields)


class SlotState(NamedTuple):
    """One row per slot, and a last row for padding."""

    settings: jax.Array  # int32[S + 1, NUM_SETTINGS]: ``SlotInts``, then ``SlotFloats``
    bias_ids: jax.Array  # int32[S + 1, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # float32[S + 1, MAX_LOGIT_BIAS]
    stop_ids: jax.Array  # int32[S + 1, MAX_STOP_IDS]; V and above are ignored
    token_ids: jax.Array  # int32[S + 1, max_model_len + 1]: tokens known at admission, and drawn
    # the input of the slot's last draw: the hidden state, or the float32 logits
    # (``Program.keeps_logits``). In an engine that pools: what ``pooling`` has made of its prompt
    drawn_from: jax.Array  # [S + 1, D] or float32[S + 1, V]
    # length of a decoding sequence if rows have drafts, as the host learns later how many were
    # accepted; None if rows have one token
    lengths: jax.Array | None = None  # int32[S + 1]
    drafts: jax.Array | None = None  # int32[S + 1, count]: that follow the last drawn token
    drafter: LayerArrays | None = None  # [S + 1, ...] each: the drafter's state


def written_rows(
    array: jax.Array,  # [S + 1, ...]
    slots: jax.Array,  # int32[B]; S for padding, else each at most once
    values: jax.Array,  # [B, ...]
) -> jax.Array:  # [S + 1, ...]
    """The array with each row's values in its slot; padding is not written.

    Indices that may be equal would make XLA's kernel for GPUs write values of 16 bits one after the
    other where they are (``kv_append.xla.written``).
    """
    outside = len(array) + jnp.arange(len(slots), dtype=jnp.int32)
    at = jnp.where(slots == len(array) - 1, outside, slots)
    return array.at[at].set(values, mode="drop", unique_indices=True)


def init_slots(
    max_num_seqs: int,
    max_model_len: int,
    drawn_from: jax.ShapeDtypeStruct,
    *,
    num_drafts: int = 0,
    drafter: LayerState | None = None,
) -> SlotState:
    """A zeroed slot state; ``drawn_from`` is the shape and dtype for one slot.

    ``drafter``: the state of a drafter, which proposes ``num_drafts`` tokens.
    """
    rows = max_num_seqs + 1
    return SlotState(
        settings=jnp.zeros((rows, NUM_SETTINGS), jnp.int32),
        bias_ids=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.zeros((rows, MAX_STOP_IDS), jnp.int32),
        token_ids=jnp.zeros((rows, max_model_len + 1), jnp.int32),
        drawn_from=jnp.zeros((rows, *drawn_from.shape), drawn_from.dtype),
        lengths=None if drafter is None else jnp.zeros(rows, jnp.int32),
        drafts=None if drafter is None else jnp.zeros((rows, num_drafts), jnp.int32),
        drafter=None
        if drafter is None
        else {one.name: jnp.zeros((rows, *one.shape), one.dtype) for one in drafter.per_slot},
    )


def settings_of(
    requests: Sequence[Request], drawn_later: Callable[[Request], bool] | None = None
) -> np.ndarray:  # int32[N, NUM_SETTINGS]
    """The settings of one or more requests, a row each.

    The temperature of requests that are ``drawn_later`` is negative, so that the step, whose tokens
    they do not use, takes the likeliest one. For 32 rows of SmolLM2 this takes a CPU 0.2 ms, a
    random draw 1 ms.
    """
    ints: list[SlotInts[int]] = []
    floats: list[SlotFloats[float]] = []
    for request in requests:
        sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
        temperature = 0.0 if sampling.greedy else sampling.temperature
        ints.append(
            SlotInts(
                seed_low=request.seed & 0xFFFF_FFFF,
                seed_high=request.seed >> 32 & 0xFFFF_FFFF,
                top_k=sampling.top_k,
                num_prompt_tokens=num_prompt_tokens,
                min_length=min(num_prompt_tokens + sampling.min_tokens, INT32_MAX),
                num_biases=len(sampling.logit_bias or ()),
            )
        )
        floats.append(
            SlotFloats(
                temperature=-temperature if drawn_later and drawn_later(request) else temperature,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                logprobs_temperature=sampling.temperature if sampling.scales_logprobs else 0.0,
            )
        )
    columns = np.array(ints, np.int64).astype(np.int32), np.array(floats, np.float32)
    return np.concatenate((columns[0], columns[1].view(np.int32)), axis=1)


def read_settings(
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
) -> tuple[SlotInts[jax.Array], SlotFloats[jax.Array]]:
    """The settings of slots, each as [B]."""
    columns = slots.settings[seq_slots].T
    floats = lax.bitcast_convert_type(columns[NUM_INTS:], jnp.float32)
    return SlotInts(*columns[:NUM_INTS]), SlotFloats(*floats)
