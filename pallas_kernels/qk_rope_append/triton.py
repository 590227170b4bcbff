"""qk_rope_append in Triton: one launch, pools written in place.

A CTA has a few heads of one token, all of one kind (queries, keys or values).
"""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.lib.numerics import heads_of_new_token, power_of_two
from pallas_kernels.lib.page_scales import pools_of
from pallas_kernels.lib.page_scales_triton import rounded, scales_of
from pallas_kernels.qk_rope_append import launch
from pallas_kernels.qk_rope_append.ref import RopeAppendArgs


@triton.jit
def _rotate_and_append(
    qkv,  # [T, N + 2K, H]
    cos,  # float32[T, H / 2]
    sin,  # float32[T, H / 2]
    qk_norms,  # [2, H]; unused without HAS_NORMS
    k_pages,  # [P, S, K, H]
    v_pages,  # [P, S, K, H]
    slot_mapping,  # int32[T]
    k_scales,  # float32[P, S, K]; unused without SCALED
    v_scales,  # float32[P, S, K]; unused without SCALED
    q,  # [T, N, H]
    EPS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    SCALED: tl.constexpr,  # pages are the bits of 8-bit floats, with scales
    NORM_VALUES: tl.constexpr,  # values have a norm without weights
    NEW: tl.constexpr,  # heads of a token for each kv head; 1: values are made of the keys
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # H / 2
    HALF_TILE: tl.constexpr,
    HEADS: tl.constexpr,  # of a CTA
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    QUERY_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    kv_tile = tl.maximum(tile - QUERY_TILES, 0)
    is_query = tile < QUERY_TILES
    is_value = kv_tile >= KV_TILES
    # The kind's first head in qkv, its number of heads, and this CTA's heads within the kind.
    of_values = (NEW - 1) * NUM_KV_HEADS
    kind_start = tl.where(is_query, 0, NUM_HEADS + tl.where(is_value, of_values, 0))
    kind_heads = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    kind_tile = tl.where(is_query, tile, tl.where(is_value, kv_tile - KV_TILES, kv_tile))
    head = kind_tile * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF_TILE)
    inside = (head < kind_heads)[:, None] & (half < HALF)[None, :]

    token_heads = token * (NUM_HEADS + NEW * NUM_KV_HEADS) + kind_start
    at = (token_heads + head)[:, None] * (2 * HALF) + half[None, :]
    first = tl.load(qkv + at, mask=inside, other=0.0)
    second = tl.load(qkv + at + HALF, mask=inside, other=0.0)
    if not is_value:
        first32 = first.to(tl.float32)
        second32 = second.to(tl.float32)
        if HAS_NORMS:
            squares = tl.sum(first32 * first32, 1) + tl.sum(second32 * second32, 1)
            scale = tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]
            weights = qk_norms + tl.where(is_query, 0, 2 * HALF) + half
            first_weight = tl.load(weights, mask=half < HALF, other=0.0).to(tl.float32)
            second_weight = tl.load(weights + HALF, mask=half < HALF, other=0.0).to(tl.float32)
            first32 = (first32 * scale * first_weight[None, :]).to(first.dtype).to(tl.float32)
            second32 = (second32 * scale * second_weight[None, :]).to(first.dtype).to(tl.float32)
        c = tl.load(cos + token * HALF + half, mask=half < HALF, other=0.0)[None, :]
        s = tl.load(sin + token * HALF + half, mask=half < HALF, other=0.0)[None, :]
        first = (first32 * c - second32 * s).to(first.dtype)
        second = (second32 * c + first32 * s).to(first.dtype)

    elif NORM_VALUES:
        first32 = first.to(tl.float32)
        second32 = second.to(tl.float32)
        squares = tl.sum(first32 * first32, 1) + tl.sum(second32 * second32, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + EPS)[:, None]
        first = (first32 * scale).to(first.dtype)
        second = (second32 * scale).to(first.dtype)

    if is_query:
        to = (token * NUM_HEADS + head)[:, None] * (2 * HALF) + half[None, :]
        tl.store(q + to, first, mask=inside)
        tl.store(q + to + HALF, second, mask=inside)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)  # offsets exceed int32
        to = (slot * NUM_KV_HEADS + head)[:, None] * (2 * HALF) + half[None, :]
        pages = k_pages
        if is_value:
            pages = v_pages
        if SCALED:
            scales = k_scales
            if is_value:
                scales = v_scales
            own = tl.maximum(scales_of(first, 1), scales_of(second, 1))
            tl.store(scales + slot * NUM_KV_HEADS + head, own, mask=head < NUM_KV_HEADS)
            low, high = rounded(first, own[:, None]), rounded(second, own[:, None])
            tl.store(pages + to, low.to(tl.uint8, bitcast=True), mask=inside)
            tl.store(pages + to + HALF, high.to(tl.uint8, bitcast=True), mask=inside)
        else:
            tl.store(pages + to, first.to(k_pages.dtype.element_ty), mask=inside)
            tl.store(pages + to + HALF, second.to(k_pages.dtype.element_ty), mask=inside)


def qk_rope_append(
    args: RopeAppendArgs,
) -> tuple[jax.Array, ...]:  # [T, N, H] and the pools
    """See ``qk_rope_append.api``."""
    return _launch_with(launch.heads_per_cta(*args.qkv.shape[:2]), args)


def qk_rope_append_fixed(
    args: RopeAppendArgs,
) -> tuple[jax.Array, ...]:  # [T, N, H] and the pools
    """The same with one tile for any number of tokens, as the layout of a tile orders its sums."""
    return _launch_with(launch.MAX_HEADS, args)


def _launch_with(tile: int, args: RopeAppendArgs) -> tuple[jax.Array, ...]:
    """With so many heads in a CTA."""
    (t, _, h), num_kv_heads = args.qkv.shape, args.k_pages.shape[2]
    num_heads, new = args.num_heads, heads_of_new_token(args.values)
    tiles = -(-num_heads // tile) + 2 * -(-num_kv_heads // tile)
    # jax-triton updates a Ref in place
    pools = tuple(map(jax.new_ref, pools_of(args)))
    q = jt.triton_call(
        args.qkv,
        args.cos,
        args.sin,
        args.cos if args.qk_norms is None else args.qk_norms,
        *pools[:2],
        args.slot_mapping,
        *(pools[2:] or (args.slot_mapping, args.slot_mapping)),
        kernel=_rotate_and_append,
        out_type=jax.ShapeDtypeStruct((t, num_heads, h), args.qkv.dtype),
        grid=(t, tiles),
        num_warps=max(1, tile // 2),
        num_stages=1,
        EPS=args.eps,
        HAS_NORMS=args.qk_norms is not None,
        SCALED=args.k_scales is not None,
        NORM_VALUES=args.values != "projected",
        NEW=new,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=h // 2,
        HALF_TILE=power_of_two(h // 2),
        HEADS=tile,
    )
    return q, *map(jax.freeze, pools)
