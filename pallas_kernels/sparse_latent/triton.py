"""sparse_latent in Triton: one launch over the chosen positions, and a second one to merge splits.

XLA multiplies queries by the weights that expand latents to keys, and sums of latents by those that
expand them to values. In between a CTA has one token, a tile of its heads, and one split of its
positions. It reads each entry from its slot once, as the key and as the value of all heads of the
tile, so no chosen entry is written anywhere. With few tokens their positions have several splits
(Flash-Decoding: Dao et al., 2023), whose states are merged by other CTAs, each with a part of one
head. Softmax is computed in base 2, sums in float32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.latent_decode.launch import MergeConfig
from pallas_kernels.latent_decode.triton import attend_block, load_keys, load_latents
from pallas_kernels.lib.attention_triton import LOG2_E, result_of
from pallas_kernels.lib.latent_pages import pools_of
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.splits_triton import store_state
from pallas_kernels.lib.token_tiles import by_tiles
from pallas_kernels.sparse_latent import launch
from pallas_kernels.sparse_latent.ref import SparseLatentArgs

SCAN = 1024  # slots that a CTA looks at together to find the last one
# Before any position m_i is less than all scores, but finite: -inf - -inf would be NaN where no
# position of a block is chosen, and a test for it in the loop would spill registers.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def last_chosen(
    slots,  # int32[K] of the token
    start,
    stop,
    SCAN: tl.constexpr,
):
    """The index behind the last chosen slot of these, of which a short context has few."""
    end = start
    for first in range(start, stop, SCAN):
        index = first + tl.arange(0, SCAN)
        slot = tl.load(slots + index, mask=index < stop, other=-1)
        end = tl.maximum(end, tl.max(tl.where(slot >= 0, index + 1, 0), 0))
    return end


@triton.jit
def _attend_split(
    q_latent,  # [T, N, C]
    q,  # [T, N, D + R], of which the last R are read
    pages,  # [P, S, C + R]; SCALED: uint8[P, S, C]
    slots,  # int32[T, K]: where the chosen positions are in the pools; -1: none
    scales,  # float32[P, S, G]; unused without SCALED
    rope_pages,  # [P, S, R]; unused without SCALED
    sinks,  # [N]; unused without HAS_SINKS
    out,  # [T, N, C]; with splits float32[T, SPLITS, N, C], without the division by l_i
    m_l,  # float32[T, SPLITS, 2, N]: m_i, l_i; unused with one split
    num_slots,  # K
    SCALE: tl.constexpr,  # of scores, times log2(e)
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a CTA
    NOPE: tl.constexpr,  # D
    RANK: tl.constexpr,  # C
    ROPE: tl.constexpr,  # R
    GROUPS: tl.constexpr,  # G
    SCALED: tl.constexpr,  # latents have 8 bits: see ``lib.latent_pages``
    HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # slots per loop iteration
    SCAN: tl.constexpr,
):
    # tiles of the same positions run at the same time: all but one read them from the L2 cache
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    per_split = tl.cdiv(tl.cdiv(num_slots, SPLITS), BLOCK) * BLOCK
    start = split * per_split
    stop = tl.minimum(start + per_split, num_slots)
    own = slots + token * num_slots
    end = last_chosen(own, start, stop, SCAN)

    components = tl.arange(0, RANK)
    rope_components = tl.arange(0, ROPE)
    in_heads = heads < NUM_HEADS
    inside = in_heads[:, None]
    at_latent = heads[:, None] * RANK + components[None, :]
    query = tl.load(q_latent + token * NUM_HEADS * RANK + at_latent, mask=inside, other=0.0)
    at_rope = q + token * NUM_HEADS * (NOPE + ROPE) + NOPE
    at_rope = at_rope + heads[:, None] * (NOPE + ROPE) + rope_components[None, :]
    query_rope = tl.load(at_rope, mask=inside, other=0.0)

    m_i = tl.full((HEADS,), LOWEST, tl.float32)
    l_i = tl.zeros((HEADS,), tl.float32)
    if HAS_SINKS:
        counts = in_heads & (split == 0)  # a sink counts once
        sink = tl.load(sinks + heads, mask=counts, other=0.0).to(tl.float32) * LOG2_E
        m_i = tl.where(counts, sink, m_i)
        l_i = tl.where(counts, 1.0, l_i)
    acc = tl.zeros((HEADS, RANK), tl.float32)
    blocks = tl.arange(0, BLOCK)
    for first in range(start, end, BLOCK):
        index = first + blocks
        slot = tl.load(own + index, mask=index < end, other=-1)
        chosen = slot >= 0
        seen = chosen[:, None]
        slot = slot.to(tl.int64)  # offsets exceed int32
        latents = load_latents(
            pages, scales, slot, seen, query.dtype, 0, RANK, RANK, ROPE, GROUPS, SCALED, BLOCK
        )
        k_rope = load_keys(
            pages, rope_pages, slot, rope_components, seen, query.dtype, RANK, ROPE, SCALED
        )
        m_i, l_i, acc = attend_block(
            query, query_rope, latents, k_rope, chosen, m_i, l_i, acc, SCALE
        )

    if SPLITS == 1:
        mean = result_of(l_i, acc).to(out.dtype.element_ty)
        tl.store(out + token * NUM_HEADS * RANK + at_latent, mean, mask=inside)
    else:
        accs = out + token * (SPLITS * NUM_HEADS * RANK)
        states = m_l + token * (SPLITS * 2 * NUM_HEADS)
        store_state(
            accs, states, split, heads, components, in_heads, inside, m_i, l_i, acc, NUM_HEADS, RANK
        )


@triton.jit
def merge_splits(
    accs,  # float32[T, SPLITS, N, C]
    m_l,  # float32[T, SPLITS, 2, N]: m_i, l_i
    out,  # [T, N, C]
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,  # a power of two, at least SPLITS
    COMPONENTS: tl.constexpr,  # of a CTA
):
    head = tl.program_id(0)
    components = tl.program_id(1) * COMPONENTS + tl.arange(0, COMPONENTS)
    token = tl.program_id(2).to(tl.int64)
    splits = tl.arange(0, TILE)
    is_split = splits < SPLITS
    at_split = token * SPLITS + splits
    at_m = m_l + at_split * 2 * NUM_HEADS + head
    m_i = tl.load(at_m, mask=is_split, other=LOWEST)
    l_i = tl.load(at_m + NUM_HEADS, mask=is_split, other=0.0)
    weights = tl.exp2(m_i - tl.max(m_i, 0))
    at_acc = accs + (at_split * NUM_HEADS + head)[:, None] * RANK + components[None, :]
    # a split without entries may have left its sums unwritten
    acc = tl.load(at_acc, mask=(l_i > 0.0)[:, None], other=0.0)
    l_sum = tl.sum(l_i * weights, 0)
    mean = tl.sum(acc * weights[:, None], 0) / tl.where(l_sum == 0.0, 1.0, l_sum)
    at_out = out + (token * NUM_HEADS + head) * RANK + components
    tl.store(at_out, mean.to(out.dtype.element_ty))


def sparse_latent(args: SparseLatentArgs) -> jax.Array:  # [T, N, V]
    """See ``sparse_latent.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(config: launch.TritonConfig, args: SparseLatentArgs) -> jax.Array:  # [T, N, V]
    """``sparse_latent`` with a given configuration, for some of the tokens at a time."""
    heads, rank = args.q.shape[1], args.k_up.shape[1]
    k_up, v_up = (w.reshape(heads, -1, rank) for w in (args.k_up, args.v_up))
    # float32 as in the kernel, not rounded to tf32
    precision = "highest" if args.q.dtype == jnp.float32 else None
    by_heads = partial(jnp.einsum, precision=precision)

    def of_tile(
        q: jax.Array,  # [W, N, D + R]
        rows: jax.Array,  # int32[W]
        positions: jax.Array,  # int32[W, K]
    ) -> jax.Array:  # [W, N, V]
        absorbed = by_heads("WND,NDC->WNC", q[..., : k_up.shape[1]], k_up)
        slots = slots_at(args.page_table, args.pages.shape[1], rows, positions)
        mixed = _attended(config, args, absorbed, q, slots)
        return by_heads("WNC,NVC->WNV", mixed, v_up)

    most = launch.MOST_TOKENS
    return by_tiles(of_tile, (args.q, args.rows, args.positions), most, cap=most)


def slots_at(
    page_table: jax.Array,  # int32[B, M]
    page_size: int,
    rows: jax.Array,  # int32[W]
    positions: jax.Array,  # int32[W, K]
) -> jax.Array:  # int32[W, K]
    """Where chosen positions are in the pools, -1 for those that are none.

    A kernel of XLA computes them: reads that wait for a page, which waits for a position, would be
    one level more than the compiler reads ahead. Layers with the same choice share the result.
    """
    at, size = jnp.maximum(positions, 0), jnp.int32(page_size)
    pages = page_table.at[rows[:, None], jax.lax.div(at, size)].get(mode="clip")
    return jnp.where(positions < 0, -1, pages * size + jax.lax.rem(at, size))


def _attended(
    config: launch.TritonConfig,
    args: SparseLatentArgs,
    absorbed: jax.Array,  # [W, N, C]
    q: jax.Array,  # [W, N, D + R]
    slots: jax.Array,  # int32[W, K]
) -> jax.Array:  # [W, N, C]
    """The weighted means of latents, of some of the call's tokens."""
    (w, n, rank), splits = absorbed.shape, config.splits
    nope = args.k_up.shape[0] // n
    sizes: dict[str, Any] = {"NUM_HEADS": n, "RANK": rank, "SPLITS": splits}
    partials = jax.ShapeDtypeStruct((w, splits, n, rank), jnp.float32)
    states = jax.ShapeDtypeStruct((w, splits, 2, n) if splits > 1 else (1,), jnp.float32)
    unused = (slots,) * 2  # placeholders for arrays that the kernel does not read
    out, m_l = jt.triton_call(
        absorbed,
        q,
        args.pages,
        slots,
        *(pools_of(args)[1:] or unused),
        slots if args.sinks is None else args.sinks,
        kernel=_attend_split,
        out_type=(partials if splits > 1 else absorbed, states),
        grid=(-(-n // config.heads), splits, w),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_slots=slots.shape[1],
        SCALE=args.scale * math.log2(math.e),
        HEADS=config.heads,
        NOPE=nope,
        ROPE=q.shape[2] - nope,
        GROUPS=1 if args.scales is None else args.scales.shape[2],
        SCALED=args.scales is not None,
        HAS_SINKS=args.sinks is not None,
        BLOCK=config.block,
        SCAN=SCAN,
        **sizes,
    )
    if splits == 1:
        return out
    merge = MergeConfig.of(splits, rank)
    return jt.triton_call(
        out,
        m_l,
        kernel=merge_splits,
        out_type=absorbed,
        grid=(n, rank // merge.components, w),
        num_warps=4,
        num_stages=1,
        TILE=power_of_two(splits),
        COMPONENTS=merge.components,
        **sizes,
    )
