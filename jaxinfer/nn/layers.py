"""The small functions that decoders are made of: layer norm, embedding rows, the output head.

Owns: numerics of these pieces. Statistics and logits are float32 whatever the dtype of weights and
activations; results keep the input's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def layer_norm(
    x: jax.Array,  # [..., D]
    weight: jax.Array,  # [D]
    bias: jax.Array,  # [D]
    eps: float,
) -> jax.Array:  # [..., D]
    """Layer normalisation over the last axis (Ba, Kiros and Hinton 2016)."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    scaled = centred * scale * weight.astype(jnp.float32)
    return (scaled + bias.astype(jnp.float32)).astype(x.dtype)


def take_rows(table: jax.Array, ids: jax.Array) -> jax.Array:  # [V, D], int32[T] -> [T, D]
    """Rows of an embedding. Ids of padding may be anything and are clamped into the table."""
    return jnp.take(table, ids, axis=0, mode="clip")


def head_logits(hidden: jax.Array, head: jax.Array) -> jax.Array:  # [..., D], [D, V]
    """Logits, float32[..., V], of a head of its own."""
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def tied_logits(hidden: jax.Array, embed: jax.Array) -> jax.Array:  # [..., D], [V, D]
    """Logits, float32[..., V], of a head that is the embedding; contracts over D in place."""
    return jnp.einsum("...D,VD->...V", hidden, embed, preferred_element_type=jnp.float32)
