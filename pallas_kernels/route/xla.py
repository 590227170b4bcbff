"""route in plain XLA, on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.route.ref import SMALLEST
from pallas_kernels.route.routing import Groups, Routing


def route(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [E, D]
    bias: jax.Array | None,  # [E]
    choice_bias: jax.Array | None,  # float32[E]
    is_token: jax.Array | None,  # bool[T]
    *,
    routing: Routing,
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """See ``route.api``."""
    logits = logits_of(x, w)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)
    scores = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else jax.nn.softmax(logits)
    ranks = scores if choice_bias is None else scores + choice_bias
    if routing.groups is not None:
        ranks = _of_best_groups(ranks, routing.groups)
    _, choices = jax.lax.top_k(ranks, routing.chosen)  # of equal ones the lower
    weights = jnp.take_along_axis(scores, choices, axis=1)
    if routing.renormalised:
        weights = weights / (weights.sum(axis=1, keepdims=True) + SMALLEST)
    if is_token is not None:
        choices = jnp.where(is_token[:, None], choices, -1)
    return choices, weights * routing.scale


def logits_of(x: jax.Array, w: jax.Array) -> jax.Array:  # [T, D], [E, D] -> float32[T, E]
    """The router's logits before its bias."""
    precision = "highest" if x.dtype == jnp.float32 else None  # not TF32
    return jnp.matmul(x, w.T, precision=precision, preferred_element_type=jnp.float32)


def _of_best_groups(ranks: jax.Array, groups: Groups) -> jax.Array:  # float32[T, E]
    """The ranks, with -inf for experts of other groups."""
    grouped = ranks.reshape(len(ranks), groups.count, -1)  # [T, groups, experts of a group]
    best, _ = jax.lax.top_k(grouped, 2 if groups.score == "best_two" else 1)
    _, chosen = jax.lax.top_k(best.sum(axis=2), groups.chosen)
    allowed = (chosen[:, :, None] == jnp.arange(groups.count)).any(axis=1)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranks.shape)
