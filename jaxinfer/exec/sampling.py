"""Drawing the next token of each row on the device, without sorting the vocabulary.

Owns: the order of effects (vLLM's: logit_bias, min_tokens, penalties, temperature, top_k, min_p,
top_p), the random bits, logprobs. Every effect that no row of the step asks for is skipped by a
``lax.cond`` on a flag that the host sets. Must not know: pages, models, requests.

The token of a sampled row is the Gumbel maximum over its logits, with noise that is a function of
(seed, position, token id). A neighbour can therefore change it only by changing the rounding of its
logits, and then only where two candidates are within that rounding of each other: about 1e-6 a
token. (Inverting one uniform over a cumulative sum would be cheaper, but there a rounding error
moves all boundaries at once: about 1e-3 a token over 50,000 entries.)
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.core.request import MAX_LOGPROBS
from jaxinfer.exec.slots import SlotFloats, SlotInts, SlotState


class SamplingFlags[A](NamedTuple):
    """What at least one row of the step needs: bools on the host, bool[] on the device."""

    bias: A  # logit_bias or min_tokens
    penalties: A
    random: A  # temperature > 0
    top_k: A
    top_p: A
    min_p: A
    logprobs: A
    prompt_logprobs: A


class Logprobs(NamedTuple):
    """Logprobs of chosen tokens under the unmodified distribution; zeros when nobody asked."""

    chosen: jax.Array  # float32[B]
    rank: jax.Array  # int32[B]: 1 for the most likely token
    top_ids: jax.Array  # int32[B, MAX_LOGPROBS]
    top_logprobs: jax.Array  # float32[B, MAX_LOGPROBS]


def sample(
    logits: jax.Array,  # float32[B, V]
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]: tokens of each sequence; the drawn token gets this position
    flags: SamplingFlags[jax.Array],
) -> jax.Array:  # int32[B]
    """Draw one token per row."""
    floats = SlotFloats(*slots.floats[seq_slots].T)
    ints = SlotInts(*slots.ints[seq_slots].T)

    def bias(logits: jax.Array) -> jax.Array:
        return _add_bias(logits, slots, seq_slots, seq_lens < ints.min_length)

    def penalties(logits: jax.Array) -> jax.Array:
        history = slots.token_ids[seq_slots]
        return _penalise(logits, history, ints.num_prompt_tokens, seq_lens, floats)

    def draw(logits: jax.Array) -> jax.Array:
        drawn = _draw(logits, floats, ints, seq_lens, flags)
        return jnp.where(floats.temperature > 0, drawn, argmax(logits))

    logits = lax.cond(flags.bias, bias, _same, logits)
    logits = lax.cond(flags.penalties, penalties, _same, logits)
    return lax.cond(flags.random, draw, argmax, logits)


def token_logprobs(
    logits: jax.Array,  # float32[B, V], unmodified
    chosen: jax.Array,  # int32[B]
    wanted: jax.Array,  # bool[]
) -> Logprobs:
    """Logprob and rank of the chosen tokens, and the most likely ones."""

    def compute(logits: jax.Array) -> Logprobs:
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
        rank = 1 + jnp.sum(logits > picked, axis=-1, dtype=jnp.int32)
        top, top_ids = lax.top_k(logits, MAX_LOGPROBS)
        return Logprobs(picked[:, 0] - log_z, rank, top_ids, top - log_z[:, None])

    return lax.cond(wanted, compute, lambda _: no_logprobs(logits.shape[0]), logits)


def no_logprobs(rows: int) -> Logprobs:
    """The value that stands where nobody asked."""
    top = (rows, MAX_LOGPROBS)
    return Logprobs(
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(top, jnp.int32),
        jnp.zeros(top, jnp.float32),
    )


def argmax(logits: jax.Array) -> jax.Array:  # [B, V] -> int32[B]
    """The first of the largest entries; two plain reductions, which XLA vectorises on a CPU
    (its fused arg-reduction does not: 0.1 ms a row of 49,152 against 0.02)."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits >= best, index, logits.shape[-1] - 1), axis=-1)


def _same(logits: jax.Array) -> jax.Array:
    return logits


def _add_bias(
    logits: jax.Array,  # float32[B, V]
    slots: SlotState,
    seq_slots: jax.Array,  # int32[B]
    too_short: jax.Array,  # bool[B]: min_tokens is not reached
) -> jax.Array:
    rows = jnp.arange(logits.shape[0])[:, None]
    ids, values = slots.bias_ids[seq_slots], slots.bias_values[seq_slots]
    logits = logits.at[rows, ids].add(values, mode="drop")
    stops = jnp.where(too_short[:, None], slots.stop_ids[seq_slots], logits.shape[1])
    return logits.at[rows, stops].set(-jnp.inf, mode="drop")


def _penalise(
    logits: jax.Array,  # float32[B, V]
    history: jax.Array,  # int32[B, max_model_len + 1]
    num_prompt_tokens: jax.Array,  # int32[B]
    seq_lens: jax.Array,  # int32[B]
    floats: SlotFloats,
) -> jax.Array:
    """Repetition over prompt and output, presence and frequency over the output (as vLLM)."""
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


def _draw(
    logits: jax.Array,  # float32[B, V]
    floats: SlotFloats,
    ints: SlotInts,
    seq_lens: jax.Array,  # int32[B]
    flags: SamplingFlags[jax.Array],
) -> jax.Array:  # int32[B]
    temperature = jnp.where(floats.temperature > 0, floats.temperature, 1.0)
    logits = logits / temperature[:, None]
    threshold = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)

    def top_k(threshold: jax.Array) -> jax.Array:
        k = jnp.where(ints.top_k > 0, ints.top_k, logits.shape[1]).astype(jnp.float32)
        return jnp.maximum(threshold, _threshold(logits, jnp.ones_like(logits), k))

    def min_p(threshold: jax.Array) -> jax.Array:
        return jnp.maximum(threshold, jnp.max(logits, axis=-1) + jnp.log(floats.min_p))

    def top_p(threshold: jax.Array) -> jax.Array:
        kept = logits >= threshold[:, None]
        weights = jnp.where(kept, jnp.exp(logits - jnp.max(logits, -1, keepdims=True)), 0.0)
        mass = floats.top_p * jnp.sum(weights, axis=-1)
        nucleus = jnp.where(floats.top_p < 1, _threshold(logits, weights, mass), threshold)
        return jnp.maximum(threshold, nucleus)

    for wanted, narrow in ((flags.top_k, top_k), (flags.min_p, min_p), (flags.top_p, top_p)):
        threshold = lax.cond(wanted, narrow, _same, threshold)
    noise = gumbel(ints.seed_low, ints.seed_high, seq_lens, logits.shape[1])
    return argmax(jnp.where(logits >= threshold[:, None], logits + noise, -jnp.inf))


def _threshold(
    logits: jax.Array,  # float32[B, V]
    weights: jax.Array,  # float32[B, V], not negative
    mass: jax.Array,  # float32[B]
) -> jax.Array:  # float32[B]
    """The largest t with sum(weights[logits >= t]) >= mass, by bisection over the float's bits.

    32 passes of compare and add find the exact value; entries equal to it are all kept. Sorting a
    row of 49,152 on a CPU takes 4 to 8 ms, this 0.2 ms.
    """
    keys = _ordered_bits(logits)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the answer is in [low, high)
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = jnp.sum(jnp.where(keys >= middle[:, None], weights, 0.0), axis=-1) >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low = jnp.full(mass.shape, jnp.iinfo(jnp.int32).min, jnp.int32)
    high = jnp.max(keys, axis=-1) + 1
    low, _ = lax.fori_loop(0, 32, narrow, (low, high))
    return _from_ordered_bits(low)


def _ordered_bits(values: jax.Array) -> jax.Array:
    """int32 keys that compare as the floats do."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_ordered_bits(keys: jax.Array) -> jax.Array:
    bits = jnp.where(keys < 0, keys ^ jnp.int32(0x7FFFFFFF), keys)
    value = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(jnp.isnan(value), -jnp.inf, value)  # below every float: nothing is cut


def gumbel(
    seed_low: jax.Array,  # int32[B]
    seed_high: jax.Array,  # int32[B]
    positions: jax.Array,  # int32[B]
    vocab_size: int,
) -> jax.Array:  # float32[B, V]
    """Standard Gumbel noise, a function of (seed, position, token id) only."""
    low, high, position = (
        lax.bitcast_convert_type(word, jnp.uint32)[:, None]
        for word in (seed_low, seed_high, positions)
    )
    key = threefry(low, high, position, jnp.zeros_like(position))
    half = (vocab_size + 1) // 2
    counter = lax.broadcasted_iota(jnp.uint32, (positions.shape[0], half), 1)
    bits = jnp.concatenate(threefry(*key, counter, jnp.zeros_like(counter)), axis=1)
    # 23 bits to the middle of 2**23 equal steps: never 0, never 1
    uniform = ((bits[:, :vocab_size] >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))


def threefry(
    key_low: jax.Array,  # uint32, broadcast against the counters
    key_high: jax.Array,  # uint32
    counter_low: jax.Array,  # uint32
    counter_high: jax.Array,  # uint32
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., SC 2011): two words for each counter pair.

    Written out because ``jax.random`` keeps one of the two words, at twice the cost.
    """
    keys = (key_low, key_high, key_low ^ key_high ^ jnp.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x, y = counter_low + keys[0], counter_high + keys[1]
    for block in range(5):
        for rotation in rotations[block % 2]:
            x = x + y
            y = (y << rotation | y >> (32 - rotation)) ^ x
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y
