"""route in plain XLA, on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.lib.numerics import softmax_last, sum_last
from pallas_kernels.route.ref import SMALLEST, RouteArgs, final_choices
from pallas_kernels.route.routing import Groups, Routing


def route(args: RouteArgs) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """See ``route.api``."""
    return routed(args, logits_of(args.x, args.w))


def routed(
    args: RouteArgs,
    logits: jax.Array,  # float32[T, E], before the bias
    *,
    fixed: bool = False,  # see ``numerics.sum_last``
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """The choices and weights of these logits."""
    routing = args.routing
    if routing.logit_scale != 1.0:
        logits = logits * routing.logit_scale
    if args.bias is not None:
        logits = logits + args.bias.astype(jnp.float32)
    if routing.scores == "sparsemixer":
        choices, weights = _one_by_one(logits, routing, fixed=fixed)
        return final_choices(args, choices), weights * routing.scale
    scores = _scores(logits, routing, fixed=fixed)
    choices = _choices(args, logits, scores) if args.given is None else args.given
    weights = jnp.take_along_axis(scores, choices, axis=1)
    if routing.renormalised:
        weights = weights / (sum_last(weights, fixed=fixed) + SMALLEST)
    if args.expert_scale is not None:
        weights = weights * args.expert_scale.astype(jnp.float32)[choices]
    return final_choices(args, choices), weights * routing.scale


def _scores(
    logits: jax.Array,  # float32[T, E]
    routing: Routing,
    *,
    fixed: bool,
) -> jax.Array:  # float32[T, E]
    """The scores of all experts."""
    if routing.scores == "sigmoid":
        return jax.nn.sigmoid(logits)
    if routing.scores == "sqrtsoftplus":
        return jnp.sqrt(jax.nn.softplus(logits))
    return softmax_last(logits, fixed=fixed)


def _choices(
    args: RouteArgs,
    logits: jax.Array,  # float32[T, E]
    scores: jax.Array,  # float32[T, E]
) -> jax.Array:  # int32[T, k]
    """The experts of the best scores or logits, with the bias of the choice."""
    routing = args.routing
    ranks = logits if routing.by_logits else scores
    ranks = ranks if args.choice_bias is None else ranks + args.choice_bias
    if routing.groups is not None:
        ranks = _of_best_groups(ranks, routing.groups)
    return jax.lax.top_k(ranks, routing.chosen)[1]  # of equal ones the lower


def _one_by_one(
    logits: jax.Array,  # float32[T, E]
    routing: Routing,
    *,
    fixed: bool,
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """The choices of "sparsemixer" and their weights."""
    left, choices, weights = logits, [], []
    for _ in range(routing.chosen):
        best, choice = left.max(axis=1, keepdims=True), left.argmax(axis=1, keepdims=True)
        far = (best - logits) > routing.spread * jnp.maximum(jnp.abs(logits), best)
        scores = softmax_last(jnp.where(far, -jnp.inf, left), fixed=fixed)
        weights.append(jnp.take_along_axis(scores, choice, axis=1))
        choices.append(choice)
        left = jnp.where(jnp.arange(logits.shape[1]) == choice, -jnp.inf, left)
    return jnp.concatenate(choices, axis=1).astype(jnp.int32), jnp.concatenate(weights, axis=1)


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
