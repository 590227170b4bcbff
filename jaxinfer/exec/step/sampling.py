"""Drawing tokens from logits on the device: logit_bias, min_tokens, penalties, masks, logprobs.

The order is vLLM's: logit_bias, min_tokens, penalties and masks first, then temperature, top_k,
min_p and top_p in ``pallas_kernels.sample``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.core.sampling_checks import INT32_MAX, MAX_LOGPROBS
from jaxinfer.exec.step.slots import SlotFloats, SlotInts, SlotState, read_settings
from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.lib.numerics import logsumexp_last
from pallas_kernels.mask.api import MaskArgs, mask
from pallas_kernels.sample.api import SampleArgs
from pallas_kernels.sample.api import sample as draw
from pallas_kernels.sample.xla import allowed_tokens

# Live arrays float32[rows, V] while tokens are drawn. Measured on a CPU: 6, with extras 7.
SAMPLING_COPIES = 8
BLOCK = 64  # rows of float32[V] that extras and scores compute at a time, as they copy logits
CHUNK = 128  # logits per chunk in ``_most_likely``
# The token of a row whose logits are NaN or infinite, because of damaged weights or an overflow.
# A token drawn from such logits would be wrong without an error.
NOT_FINITE = INT32_MAX
# The token of a row whose mask did not come in time: see ``pallas_kernels.mask``.
NO_MASK = INT32_MAX - 1
# int32 values of a packed row without named tokens: see ``read_logprobs``
LOGPROBS_WIDTH = 2 + 2 * MAX_LOGPROBS


class Awaited(NamedTuple):
    """The masks for which a step waits: see ``pallas_kernels.mask``."""

    rows: jax.Array  # bool[B]: those that wait
    place: jax.Array  # int32[3]


class Logprobs[A](NamedTuple):
    """Logprobs of chosen tokens; see ``SamplingParams``."""

    chosen: A  # float32[B]
    rank: A  # int32[B]: 1 for the most likely token
    top_ids: A  # int32[B, MAX_LOGPROBS]
    top_logprobs: A  # float32[B, MAX_LOGPROBS]
    named: A  # float32[B, K]: of further tokens that requests name, padded


def sample(
    logits: jax.Array,  # float32[B, V]
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]: tokens of each sequence; also the drawn token's position
    pins: Pins = NO_PINS,
    changed: jax.Array | None = None,  # float32[B, V]: the logits after ``with_extras``
    masks: jax.Array | None = None,  # uint32[B, W]: see ``with_masks``, if they are not applied yet
    awaited: Awaited | None = None,
    draws_once: bool = False,  # see ``slots.settings_of``; only for draws with extras
) -> tuple[jax.Array, jax.Array]:  # int32[B], float32[B, V]
    """Draw one token per row from the raw logits, or from the ``changed`` ones.

    The token is ``NOT_FINITE`` if a raw logit is NaN or infinite, and ``NO_MASK`` if the row waited
    for a mask that did not come. It is returned with the logits before ``masks``, in which those of
    rows that waited are masked.
    """
    ints, floats = read_settings(slots, seq_slots)
    given = logits if changed is None else changed
    if draws_once:  # the step has looked at the logits: 0.1 ms for 8 rows of SmolLM2
        finite = slots.token_ids[seq_slots, seq_lens] != NOT_FINITE
    else:
        finite = jnp.isfinite(logits).all(axis=-1)
    in_time = None
    if awaited is not None:
        args = MaskArgs(
            wanted=awaited.rows.astype(jnp.int32),
            finite=finite.astype(jnp.int32),
            logits=given,
            slots=seq_slots,
            place=awaited.place,
            num_slots=slots.token_ids.shape[0],
        )
        given, in_time = mask(args, pins.of("mask"))
    args = SampleArgs(
        logits=given,
        temperature=jnp.abs(floats.temperature) if draws_once else floats.temperature,
        top_k=ints.top_k,
        top_p=floats.top_p,
        min_p=floats.min_p,
        seed_low=ints.seed_low,
        seed_high=ints.seed_high,
        positions=seq_lens,
        masks=masks,
    )
    token_ids = draw(args, pins.of("sample"))
    if in_time is not None:
        token_ids = jnp.where(in_time > 0, token_ids, NO_MASK)
    return jnp.where(finite, token_ids, NOT_FINITE), given


def place_to_publish(place: jax.Array, axis: str | None) -> jax.Array:  # int32[3] each
    """The place on the token board, on several devices only for the first: their tokens are equal.

    At address 0 ``publish`` writes nothing. ``axis`` is as in ``StepContext``.
    """
    return place if axis is None else jnp.where(lax.axis_index(axis) == 0, place, 0)


def any_extras(
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]: 0 for padding
) -> jax.Array:  # bool[]
    """True if ``with_extras`` changes the logits of any row."""
    ints, floats = read_settings(slots, seq_slots)
    of_rows = (
        (ints.num_biases > 0)
        | (seq_lens < ints.min_length)
        | (floats.presence_penalty != 0)
        | (floats.frequency_penalty != 0)
        | (floats.repetition_penalty != 1)
    )
    return jnp.any(of_rows & (seq_lens > 0))


def with_extras(
    logits: jax.Array,  # float32[B, V]
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]
) -> jax.Array:  # float32[B, V]
    """Logits after logit_bias, min_tokens and penalties; rows without these are not changed."""
    ints, floats = read_settings(slots, seq_slots)
    logits = _add_bias(logits, slots, seq_slots, ints, seq_lens)
    return _penalise(logits, slots.token_ids[seq_slots], ints.num_prompt_tokens, seq_lens, floats)


def with_masks(
    logits: jax.Array,  # float32[B, V], unmodified
    changed: jax.Array,  # float32[B, V]: the logits after ``with_extras``
    masks: jax.Array,  # uint32[B, W]: bit t % 32 of word t // 32 is 1 if token t may be drawn
) -> jax.Array:  # float32[B, V]
    """The changed logits, -inf for tokens that may not be drawn.

    min_tokens gives way where it leaves no token: a complete answer ends.
    """
    allowed = allowed_tokens(masks, logits.shape[1])
    masked = jnp.where(allowed, changed, -jnp.inf)
    any_left = (masked > -jnp.inf).any(axis=1, keepdims=True)
    return jnp.where(any_left, masked, jnp.where(allowed, logits, -jnp.inf))


def token_logprobs(
    logits: jax.Array,  # float32[B, V], unmodified
    chosen: jax.Array,  # int32[B]
    temperature: jax.Array | None = None,  # float32[B]; 0: logits are not divided
    named: jax.Array | None = None,  # int32[B, K]: further tokens
    *,
    fixed: bool = False,  # see ``numerics.sum_last``
) -> jax.Array:  # int32[B, LOGPROBS_WIDTH + K]: see ``read_logprobs``
    """Logprob and rank of the chosen tokens, the most likely tokens with their logprobs, and the
    logprobs of named ones.
    """
    if temperature is not None:
        logits = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    log_z = logsumexp_last(logits, fixed=fixed)
    picked = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > picked, axis=-1, dtype=jnp.int32)
    top, top_ids = _most_likely(logits, MAX_LOGPROBS)
    parts = [picked - log_z, rank[:, None], top_ids, top - log_z]
    if named is not None:
        parts.append(jnp.take_along_axis(logits, named, axis=-1) - log_z)
    # one array, as each copy to the host takes 0.5 ms (H100)
    return jnp.concatenate(
        [a if a.dtype == jnp.int32 else lax.bitcast_convert_type(a, jnp.int32) for a in parts],
        axis=1,
    )


def read_logprobs(
    packed: np.ndarray,  # int32[B, LOGPROBS_WIDTH + K]
) -> Logprobs[np.ndarray]:
    """Views of the result of ``token_logprobs``."""
    floats = packed.view(np.float32)
    top = 2 + MAX_LOGPROBS
    return Logprobs(
        floats[:, 0],
        packed[:, 1],
        packed[:, 2:top],
        floats[:, top:LOGPROBS_WIDTH],
        floats[:, LOGPROBS_WIDTH:],
    )


def _most_likely(
    logits: jax.Array,  # float32[B, V]
    count: int,
) -> tuple[jax.Array, jax.Array]:  # float32[B, count], int32[B, count]
    """As ``lax.top_k``, but without a sort of the whole vocabulary.

    The ``count`` largest logits are in the ``count`` chunks with the largest maxima: a logit of
    another chunk is not larger than those maxima, and on a tie it comes later.
    """
    vocab = logits.shape[1]
    num_chunks = -(-vocab // CHUNK)
    padding = ((0, 0), (0, num_chunks * CHUNK - vocab))
    chunks = jnp.pad(logits, padding, constant_values=-jnp.inf)
    maxima = chunks.reshape(-1, num_chunks, CHUNK).max(axis=2)
    _, best = lax.top_k(maxima, min(count, num_chunks))
    # sorted, as the first of equal logits counts
    ids = jnp.sort(best, axis=1)[:, :, None] * CHUNK + jnp.arange(CHUNK)
    ids = ids.reshape(logits.shape[0], -1)
    values = jnp.take_along_axis(logits, jnp.minimum(ids, vocab - 1), axis=1)
    top, indices = lax.top_k(jnp.where(ids < vocab, values, -jnp.inf), count)
    return top, jnp.take_along_axis(ids, indices, axis=1)


def _add_bias(
    logits: jax.Array,  # float32[B, V]
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
    ints: SlotInts[jax.Array],
    seq_lens: jax.Array,  # int32[B]
) -> jax.Array:
    rows, vocab = jnp.arange(logits.shape[0])[:, None], logits.shape[1]
    own = jnp.arange(slots.bias_ids.shape[1])[None, :] < ints.num_biases[:, None]
    ids = jnp.where(own, slots.bias_ids[seq_slots], vocab)
    logits = logits.at[rows, ids].add(slots.bias_values[seq_slots], mode="drop")
    too_short = seq_lens < ints.min_length
    stops = jnp.where(too_short[:, None], slots.stop_ids[seq_slots], vocab)
    return logits.at[rows, stops].set(-jnp.inf, mode="drop")


def _penalise(
    logits: jax.Array,  # float32[B, V]
    history: jax.Array,  # int32[B, max_model_len + 1]
    num_prompt_tokens: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]
    floats: SlotFloats[jax.Array],
) -> jax.Array:
    """Repetition penalty over prompt and output, presence and frequency penalties over the output.

    The formulas are vLLM's.
    """
    vocab = logits.shape[1]
    rows = jnp.arange(logits.shape[0])[:, None]
    index = jnp.arange(history.shape[1])[None, :]
    known = index < seq_lens[:, None]
    output = known & (index >= num_prompt_tokens[:, None])
    empty = jnp.zeros(logits.shape, jnp.float32)
    seen = empty.at[rows, jnp.where(known, history, vocab)].max(1.0, mode="drop") > 0
    counts = empty.at[rows, jnp.where(output, history, vocab)].add(1.0, mode="drop")
    repetition = floats.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    frequency = counts * floats.frequency_penalty[:, None]
    presence = jnp.where(counts > 0, floats.presence_penalty[:, None], 0.0)
    return logits - frequency - presence


def by_blocks(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Map ``function`` over arrays [N, ...], ``BLOCK`` rows at a time to bound its temporaries."""
    rows = arrays[0].shape[0]
    if rows <= BLOCK:
        return function(*arrays)
    padding = -rows % BLOCK
    padded = (jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))) for a in arrays)
    blocks = tuple(a.reshape(-1, BLOCK, *a.shape[1:]) for a in padded)
    results = lax.map(lambda block: function(*block), blocks)
    return results.reshape(-1, *results.shape[2:])[:rows]
