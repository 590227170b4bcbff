"""The definition of route: sorted scores, in float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import STATIC
from pallas_kernels.route.routing import Routing

SEED_VALUES = 8  # of a token, from which ``shifted`` draws
GOLDEN = 0x9E3779B1  # 2 ** 32 / the golden ratio: Fibonacci hashing (Knuth 1973)
SMALLEST = 1e-20  # added to a sum of weights, which may be 0 (DeepSeek-V3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RouteArgs:
    """The arguments of ``route``."""

    x: jax.Array  # [T, D]
    w: jax.Array  # [E, D]
    bias: jax.Array | None = None  # [E], of the logits
    choice_bias: jax.Array | None = None  # float32[E], of the scores that choose
    expert_scale: jax.Array | None = None  # [E], of the weights
    # int32[T, k]: the experts, if others than the router choose them; it makes their weights alone
    given: jax.Array | None = None
    is_token: jax.Array | None = None  # bool[T]: False for padding, which chooses -1
    routing: Routing = field(metadata=STATIC)


def route(args: RouteArgs) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """See ``route.api``."""
    x, w, routing = args.x, args.w, args.routing
    x, w = (jnp.asarray(array, jnp.float32) for array in (x, w))
    logits = jnp.matmul(x, w.T, precision="highest") * routing.logit_scale
    if args.bias is not None:
        logits = logits + jnp.asarray(args.bias, jnp.float32)
    if routing.scores == "sparsemixer":
        return _sparsemixer(args, np.asarray(logits, np.float64))
    if routing.scores == "sqrtsoftplus":
        scores = jnp.sqrt(jnp.logaddexp(logits, 0))
    else:
        scores = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else jax.nn.softmax(logits)
    ranks = logits if routing.by_logits else scores
    if args.choice_bias is not None:
        ranks = ranks + jnp.asarray(args.choice_bias, jnp.float32)
    if routing.groups is not None:
        count, chosen, score = routing.groups
        grouped = jnp.sort(ranks.reshape(len(ranks), count, -1), axis=2, descending=True)
        of_group = grouped[..., 0] + (grouped[..., 1] if score == "best_two" else 0)
        best = jnp.argsort(-of_group, axis=1, stable=True)[:, :chosen]  # [T, chosen]
        group = jnp.arange(ranks.shape[1]) // (ranks.shape[1] // count)
        allowed = (best[:, :, None] == group).any(axis=1)
        ranks = jnp.where(allowed, ranks, -jnp.inf)
    choices = jnp.argsort(-ranks, axis=1, stable=True)[:, : routing.chosen].astype(jnp.int32)
    choices = choices if args.given is None else jnp.asarray(args.given)
    weights = jnp.take_along_axis(scores, choices, axis=1)
    if routing.renormalised:
        weights = weights / (weights.sum(axis=1, keepdims=True) + SMALLEST)
    if args.expert_scale is not None:
        weights = weights * jnp.asarray(args.expert_scale, jnp.float32)[choices]
    return final_choices(args, choices), weights * routing.scale


def final_choices(args: RouteArgs, choices: jax.Array) -> jax.Array:  # int32[T, k]
    """The router's choices shifted, if they are to be; -1 for padding."""
    if args.routing.shifted_among:
        choices = shifted(choices, args.x, args.routing.shifted_among)
    if args.is_token is None:
        return choices
    return jnp.where(jnp.asarray(args.is_token)[:, None], choices, -1)


def shifted(
    choices: jax.Array,  # int32[T, k]
    x: jax.Array,  # [T, D]
    count: int,
) -> jax.Array:  # int32[T, k]
    """The choices, all shifted by a pseudo-random number of experts that depends on the token.

    Each expert is then chosen with probability k / count whatever the router says, and different
    tokens choose independently. (With random weights the tokens of a batch may be so alike that
    most choose the same experts.) A token's experts depend on no other token.
    """
    bits = jax.lax.bitcast_convert_type(x[:, :SEED_VALUES].astype(jnp.float32), jnp.uint32)
    hashed = jnp.zeros(len(x), jnp.uint32)
    for i in range(bits.shape[1]):
        hashed = (hashed ^ bits[:, i]) * jnp.uint32(GOLDEN)
        hashed = hashed ^ (hashed >> 15)
    shift = (hashed % jnp.uint32(count)).astype(jnp.int32)
    return (choices + shift[:, None]) % count


def _sparsemixer(
    args: RouteArgs,
    logits: np.ndarray,  # float64[T, E]
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """The choices of "sparsemixer", token by token."""
    routing = args.routing
    choices = np.zeros((len(logits), routing.chosen), np.int32)
    weights = np.zeros(choices.shape, np.float32)
    for t, row in enumerate(logits):
        left = [*range(len(row))]
        for i in range(routing.chosen):
            best = max(left, key=lambda e: row[e])
            top = row[best]
            near = [e for e in left if (top - row[e]) / max(abs(row[e]), top) <= routing.spread]
            choices[t, i] = best
            weights[t, i] = routing.scale / sum(np.exp(row[e] - top) for e in near)
            left.remove(best)
    return final_choices(args, jnp.asarray(choices)), jnp.asarray(weights)
