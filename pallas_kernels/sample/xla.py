"""sample in plain XLA: thresholds by bisection; filters that no row uses are skipped.

They are skipped by ``lax.cond`` on the parameters, which costs nothing on a CPU. On a GPU the host
waits for each condition, so there this implementation is for comparison only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sample.ref import SampleArgs


@jax.jit  # one trace (0.5 s) serves all steps with the same number of rows
def sample(args: SampleArgs) -> jax.Array:  # int32[B]
    """See ``sample.api``."""
    logits = args.logits
    if args.masks is not None:
        logits = jnp.where(allowed_tokens(args.masks, logits.shape[1]), logits, -jnp.inf)
    random = args.temperature > 0

    def draw(logits: jax.Array) -> jax.Array:
        scaled = logits / jnp.where(random, args.temperature, 1.0)[:, None]
        threshold = _filter_threshold(scaled, random, args.top_k, args.top_p, args.min_p)
        noise = gumbel(args.seed_low, args.seed_high, args.positions, logits.shape[1])
        noisy = jnp.where(scaled >= threshold[:, None], scaled + noise, -jnp.inf)
        return argmax(jnp.where(random[:, None], noisy, logits))

    return lax.cond(jnp.any(random), draw, argmax, logits)


def allowed_tokens(masks: jax.Array, vocab_size: int) -> jax.Array:  # uint32[B, W] -> bool[B, V]
    """True for each token t of which bit t % 32 of word t // 32 is 1."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)
    return (bits & 1).reshape(masks.shape[0], -1)[:, :vocab_size] > 0


def argmax(logits: jax.Array) -> jax.Array:  # [B, V] -> int32[B]
    """The first of the largest entries; two plain reductions, which XLA vectorises on a CPU
    (its fused arg-reduction does not: 0.1 ms a row of 49,152 against 0.02)."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits >= best, index, logits.shape[-1] - 1), axis=-1)


def _filter_threshold(
    logits: jax.Array,  # float32[B, V], divided by the temperature
    random: jax.Array,  # bool[B]
    top_k: jax.Array,  # int32[B]
    top_p: jax.Array,  # float32[B]
    min_p: jax.Array,  # float32[B]
) -> jax.Array:  # float32[B]
    """The threshold of each row; smaller logits are dropped.

    The threshold of top_k does not depend on min_p, so min_p may come first. The other two are
    passes of one loop: XLA compiles a bisection once, which is a third of the time that a draw
    takes it.
    """
    best = jnp.max(logits, axis=-1)

    def narrow(i: jax.Array, threshold: jax.Array) -> jax.Array:
        nucleus = i == 1  # else top_k
        wanted = jnp.where(nucleus, top_p < 1, top_k > 0)

        def cut(threshold: jax.Array) -> jax.Array:
            kept = logits >= threshold[:, None]
            mass = jnp.where(kept, jnp.exp(logits - best[:, None]), 0.0)
            weights = jnp.where(nucleus, mass, 1.0)
            least = jnp.where(nucleus, top_p * jnp.sum(mass, axis=-1), top_k.astype(jnp.float32))
            found = _threshold(logits, weights, least)
            return jnp.where(wanted, jnp.maximum(threshold, found), threshold)

        return lax.cond(jnp.any(wanted & random), cut, lambda same: same, threshold)

    return lax.fori_loop(0, 2, narrow, best + jnp.log(min_p))


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
    return jnp.where(jnp.isnan(value), -jnp.inf, value)  # keys below -inf: nothing is dropped


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
