"""route in Triton: a launch that chooses, with one CTA per token, after the logits.

Of a few tokens in 16 bits another launch makes them, split over K, and the first adds the partials.
Of others XLA does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.route import launch
from pallas_kernels.route.ref import GOLDEN, SEED_VALUES, SMALLEST, RouteArgs
from pallas_kernels.route.xla import logits_of
from pallas_kernels.skinny_gemm.fixed.triton import skinny_gemm, weights_tile
from pallas_kernels.skinny_gemm.ref import GemmArgs

VALUES_OF_WARP = 256  # scores of experts, 8 of each thread
PARTIALS_OF_WARP = 1024


@triton.jit
def _multiply(
    x,  # [T, D]
    w,  # [E, D]
    partials,  # float32[SPLITS, T, E]
    num_tokens,  # T; not a constexpr, so that several buckets share a kernel
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,  # D
    TOKENS_TILE: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A split's addends of the logits of all tokens and a tile of experts."""
    EVEN: tl.constexpr = INNER == BLOCK_K * BLOCKS * SPLITS
    token = tl.arange(0, TOKENS_TILE)
    expert = tl.program_id(0) * EXPERTS_TILE + tl.arange(0, EXPERTS_TILE)
    split = tl.program_id(1)
    is_token, is_expert = token < num_tokens, expert < EXPERTS
    acc = tl.zeros((TOKENS_TILE, EXPERTS_TILE), tl.float32)
    for block in range(BLOCKS):
        inner = (split * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = is_token[:, None] if EVEN else is_token[:, None] & (inner < INNER)[None, :]
        tokens = tl.load(x + token[:, None] * INNER + inner[None, :], mask=mask, other=0.0)
        own = weights_tile(w, inner, expert, is_expert, INNER, EXPERTS, True, EVEN)
        acc = tl.dot(tokens, own, acc)
    at = (split * num_tokens + token)[:, None] * EXPERTS + expert[None, :]
    tl.store(partials + at, acc, mask=is_token[:, None] & is_expert[None, :])


@triton.jit
def _group_ranks(
    ranks,  # float32[TILE]: of the experts
    group,  # int32[TILE]: of each expert
    NUM_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
):
    """The rank of each expert's group: its best expert's, or the sum of its two best."""
    expert = tl.arange(0, ranks.shape[0])
    found = tl.full(ranks.shape, float("-inf"), tl.float32)
    for g in tl.static_range(NUM_GROUPS):  # type: ignore[misc]
        own = tl.where(group == g, ranks, float("-inf"))
        best = tl.max(own, 0)
        if BEST_TWO:
            first = tl.min(tl.where(own == best, expert, ranks.shape[0]), 0)
            best += tl.max(tl.where(expert == first, float("-inf"), own), 0)
        found = tl.where(group == g, best, found)
    return found


@triton.jit
def _shift(
    x,  # [D]: of the token
    INNER: tl.constexpr,  # D
    COUNT: tl.constexpr,
    SEED_VALUES: tl.constexpr,
    GOLDEN: tl.constexpr,
):
    """The number by which a token's choices are shifted: see ``ref.shifted``."""
    hashed = tl.full((), 0, tl.uint32)
    for i in tl.static_range(SEED_VALUES):  # type: ignore[misc]
        if i < INNER:
            bits = tl.load(x + i).to(tl.float32).to(tl.uint32, bitcast=True)
            hashed = (hashed ^ bits) * tl.full((), GOLDEN, tl.uint32)
            hashed = hashed ^ (hashed >> 15)
    return (hashed % COUNT).to(tl.int32)


@triton.jit
def _choose(
    x,  # [T, D], unused without SHIFTED_AMONG
    logits,  # float32[SPLITS, T, E], to be added
    bias,  # [E], unused without BIAS
    choice_bias,  # float32[E], unused without CHOICE_BIAS
    expert_scale,  # [E], unused without EXPERT_SCALE
    is_token,  # int32[T], unused without PADDED
    choices,  # int32[T, k]
    weights,  # float32[T, k]
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    SIGMOID: tl.constexpr,
    SPARSEMIXER: tl.constexpr,
    SPREAD: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    RENORMALISED: tl.constexpr,
    SCALE: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    INNER: tl.constexpr,  # D
    SHIFTED_AMONG: tl.constexpr,  # 0: not shifted
    SEED_VALUES: tl.constexpr,
    GOLDEN: tl.constexpr,
    SMALLEST: tl.constexpr,
    NUM_GROUPS: tl.constexpr,  # 0: none
    GROUPS_CHOSEN: tl.constexpr,
    BEST_TWO: tl.constexpr,
    BIAS: tl.constexpr,
    CHOICE_BIAS: tl.constexpr,
    EXPERT_SCALE: tl.constexpr,
    PADDED: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.arange(0, TILE)
    inside = expert < EXPERTS
    split = tl.arange(0, SPLITS_TILE)[:, None]
    at_logit = (split * tl.num_programs(0) + token) * EXPERTS + expert[None, :]
    partials = tl.load(logits + at_logit, mask=(split < SPLITS) & inside[None, :], other=0.0)
    z = tl.where(inside, tl.sum(partials, 0), float("-inf"))
    if LOGIT_SCALE != 1.0:
        z *= LOGIT_SCALE
    if BIAS:
        z += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-z))
    else:
        powers = tl.exp(z - tl.max(z, 0))
        scores = powers / tl.sum(powers, 0)
    ranks = z if BY_LOGITS else scores
    if CHOICE_BIAS:
        ranks += tl.load(choice_bias + expert, mask=inside, other=0.0)
    ranks = tl.where(inside, ranks, float("-inf"))
    if NUM_GROUPS > 0:
        group = expert // (EXPERTS // NUM_GROUPS)
        of_group = _group_ranks(ranks, group, NUM_GROUPS, BEST_TWO)
        allowed = tl.zeros((TILE,), tl.int1)
        for _ in tl.static_range(GROUPS_CHOSEN):  # type: ignore[misc]
            best = tl.max(of_group, 0)
            first = tl.min(tl.where(of_group == best, group, NUM_GROUPS), 0)
            allowed = allowed | (group == first)
            of_group = tl.where(group == first, float("-inf"), of_group)
        ranks = tl.where(allowed, ranks, float("-inf"))
    if EXPERT_SCALE:
        scales = tl.load(expert_scale + expert, mask=inside, other=0.0).to(tl.float32)
    number = tl.arange(0, CHOSEN_TILE)
    factor = tl.zeros((CHOSEN_TILE,), tl.float32)
    chosen = tl.zeros((CHOSEN_TILE,), tl.int32)
    weight = tl.zeros((CHOSEN_TILE,), tl.float32)
    for i in tl.static_range(CHOSEN):  # type: ignore[misc]
        best, first = tl.max(ranks, 0, return_indices=True)  # of equal ones the first
        chosen = tl.where(number == i, first, chosen)
        if SPARSEMIXER:  # a softmax of those that are near the best and not yet chosen
            near = best - z <= SPREAD * tl.maximum(tl.abs(z), best)
            own = 1.0 / tl.sum(tl.where(near, tl.exp(ranks - best), 0.0), 0)
        else:
            own = tl.sum(tl.where(expert == first, scores, 0.0), 0)
        weight = tl.where(number == i, own, weight)
        if EXPERT_SCALE:
            factor = tl.where(
                number == i, tl.sum(tl.where(expert == first, scales, 0.0), 0), factor
            )
        ranks = tl.where(expert == first, float("-inf"), ranks)
    if RENORMALISED:
        weight = weight / (tl.sum(weight, 0) + SMALLEST)
    if EXPERT_SCALE:
        weight *= factor
    if SHIFTED_AMONG > 0:
        own_x = x + token.to(tl.int64) * INNER
        chosen += _shift(own_x, INNER, SHIFTED_AMONG, SEED_VALUES, GOLDEN)  # type: ignore[misc]
        chosen %= SHIFTED_AMONG
    if PADDED:
        chosen = tl.where(tl.load(is_token + token) != 0, chosen, -1)
    at = token * CHOSEN + number
    tl.store(choices + at, chosen, mask=number < CHOSEN)
    tl.store(weights + at, weight * SCALE, mask=number < CHOSEN)


def route(args: RouteArgs) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """See ``route.api``."""
    tiles = launch.logit_tiles(args)
    return _chosen(args, logits_of(args.x, args.w) if tiles is None else _partials(args, tiles))


def route_fixed(args: RouteArgs) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    """The same with logits whose bits do not depend on the number of tokens."""
    return _chosen(args, skinny_gemm(GemmArgs(x=args.x, w=args.w, by_output=True, wide=True)))


def _partials(args: RouteArgs, tiles: launch.LogitTiles) -> jax.Array:  # float32[S, T, E]
    """Split-K partials of the logits."""
    (tokens, inner), experts = args.x.shape, len(args.w)
    return jt.triton_call(
        args.x,
        args.w,
        kernel=_multiply,
        out_type=jax.ShapeDtypeStruct((tiles.splits, tokens, experts), jnp.float32),
        grid=(-(-experts // tiles.experts), tiles.splits),
        num_warps=4,
        num_stages=min(tiles.blocks, launch.MAX_STAGES),
        num_tokens=tokens,
        EXPERTS=experts,
        INNER=inner,
        TOKENS_TILE=tiles.tokens,
        EXPERTS_TILE=tiles.experts,
        BLOCK_K=launch.BLOCK_K,
        BLOCKS=tiles.blocks,
        SPLITS=tiles.splits,
    )


def _chosen(
    args: RouteArgs,
    logits: jax.Array,  # float32[T, E], or partials [S, T, E]
) -> tuple[jax.Array, jax.Array]:  # int32[T, k], float32[T, k]
    routing = args.routing
    *_, tokens, experts = logits.shape
    splits = logits.size // (tokens * experts)
    splits_tile = power_of_two(splits)
    tile, groups, results = power_of_two(experts), routing.groups, (tokens, routing.chosen)
    choices, weights = jt.triton_call(
        args.x,
        logits,
        logits if args.bias is None else args.bias,
        logits if args.choice_bias is None else args.choice_bias,
        logits if args.expert_scale is None else args.expert_scale,
        logits if args.is_token is None else args.is_token.astype(jnp.int32),
        kernel=_choose,
        out_type=(
            jax.ShapeDtypeStruct(results, jnp.int32),
            jax.ShapeDtypeStruct(results, jnp.float32),
        ),
        grid=(tokens,),
        num_warps=max(1, tile // VALUES_OF_WARP, tile * splits_tile // PARTIALS_OF_WARP),
        num_stages=1,
        EXPERTS=experts,
        TILE=tile,
        SPLITS=splits,
        SPLITS_TILE=splits_tile,
        CHOSEN=routing.chosen,
        CHOSEN_TILE=power_of_two(routing.chosen),
        SIGMOID=routing.scores == "sigmoid",
        SPARSEMIXER=routing.scores == "sparsemixer",
        SPREAD=routing.spread,
        BY_LOGITS=routing.by_logits or routing.scores == "sparsemixer",
        RENORMALISED=routing.renormalised,
        SCALE=routing.scale,
        LOGIT_SCALE=routing.logit_scale,
        INNER=args.x.shape[1],
        SHIFTED_AMONG=routing.shifted_among,
        SEED_VALUES=SEED_VALUES,
        GOLDEN=GOLDEN,
        SMALLEST=SMALLEST,
        NUM_GROUPS=0 if groups is None else groups.count,
        GROUPS_CHOSEN=0 if groups is None else groups.chosen,
        BEST_TWO=groups is not None and groups.score == "best_two",
        BIAS=args.bias is not None,
        CHOICE_BIAS=args.choice_bias is not None,
        EXPERT_SCALE=args.expert_scale is not None,
        PADDED=args.is_token is not None,
    )
    return choices, weights
