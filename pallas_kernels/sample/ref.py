"""The definition of sample: sort, filter, add noise, take the largest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampleArgs:
    """The arguments of ``sample``."""

    logits: jax.Array  # float32[B, V]
    temperature: jax.Array  # float32[B]
    top_k: jax.Array  # int32[B]
    top_p: jax.Array  # float32[B]
    min_p: jax.Array  # float32[B]
    seed_low: jax.Array  # int32[B]
    seed_high: jax.Array  # int32[B]
    positions: jax.Array  # int32[B]
    masks: jax.Array | None = None  # uint32[B, W]

    @property
    def filters(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The temperature, top_k, top_p and min_p of each row."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def noise(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The seed of a row in two halves, and its position; its noise depends on nothing else."""
        return self.seed_low, self.seed_high, self.positions


@jax.jit
def sample(args: SampleArgs) -> jax.Array:  # int32[B]
    """See ``sample.api``; computed row by row."""
    logits = args.logits
    if args.masks is not None:
        tokens = jnp.arange(logits.shape[1])
        bits = args.masks[:, tokens // 32] >> (tokens % 32).astype(jnp.uint32)
        logits = jnp.where(bits & 1, logits, -jnp.inf)
    return jax.lax.map(_sample_row, replace(args, logits=logits, masks=None))


def _sample_row(row: SampleArgs) -> jax.Array:  # int32[]; the arrays without their first axis
    logits, (temperature, top_k, top_p, min_p) = row.logits, row.filters
    vocab = logits.size
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    descending = -jnp.sort(-scaled)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
    threshold = jnp.maximum(descending[last], descending[0] + jnp.log(min_p))
    weights = jnp.exp(descending - descending[0])
    mass = jnp.cumsum(jnp.where(descending >= threshold, weights, 0.0))
    nucleus = descending[jnp.argmax(mass >= top_p * mass[-1])]
    threshold = jnp.where(top_p < 1, jnp.maximum(threshold, nucleus), threshold)
    noisy = scaled + _gumbel(jnp.stack([row.seed_low, row.seed_high]), row.positions, vocab)
    sampled = jnp.argmax(jnp.where(scaled >= threshold, noisy, -jnp.inf))
    return jnp.where(temperature > 0, sampled, jnp.argmax(logits)).astype(jnp.int32)


def _gumbel(
    seed: jax.Array,  # int32[2]
    position: jax.Array,  # int32[]
    vocab: int,
) -> jax.Array:  # float32[V]
    """Standard Gumbel noise from Threefry's words, the first words of all counters before the
    second: 23 bits of each, to the middle of 2**23 equal steps, so neither 0 nor 1."""
    words = jnp.stack([position, jnp.zeros_like(position)])
    key = threefry_2x32(*(jax.lax.bitcast_convert_type(x, jnp.uint32) for x in (seed, words)))
    counters = jnp.arange((vocab + 1) // 2, dtype=jnp.uint32)
    bits = threefry_2x32(key, jnp.concatenate([counters, jnp.zeros_like(counters)]))[:vocab]
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(uniform))
