"""latent_decode in Triton: append and attend in one launch, and a second one to merge splits.

A CTA has a tile of heads and one split of a row's tokens. It reads each entry once, as the key and
as the value of all heads of the tile. The CTA of the last split appends the new entry and attends
to it from its registers, so no CTA waits until it is in memory. With few rows a context has several
splits (Flash-Decoding: Dao et al., 2023), whose states are merged in order by other CTAs, each
with a part of one head. Softmax is computed in base 2, sums in float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.latent_decode import launch
from pallas_kernels.latent_decode.ref import LatentDecodeArgs
from pallas_kernels.lib.latent_pages import appended, pools_of


@triton.jit
def _split_size(last, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of a split, whole blocks, for the ``last`` tokens before the new one."""
    return tl.maximum(tl.cdiv(tl.cdiv(last, SPLITS), BLOCK), 1) * BLOCK


@triton.jit
def attend_block(
    q_latent,  # [HEADS, C]
    q_rope,  # [HEADS, R]; None if latents are whole keys
    latents,  # [BLOCK, C]
    k_rope,  # [BLOCK, R]; None with ``q_rope``
    visible,  # bool[BLOCK]: at least one, unless m_i is finite
    m_i,  # float32[HEADS]: largest score so far
    l_i,  # float32[HEADS]: sum of exp2(score - m_i)
    acc,  # float32[HEADS, C]: sum of exp2(score - m_i) * latent
    SCALE: tl.constexpr,  # of scores, times log2(e)
):
    scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
    if q_rope is not None:
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
    scores = scores * SCALE
    scores = tl.where(visible[None, :], scores, float("-inf"))
    m_ij = tl.maximum(m_i, tl.max(scores, 1))
    alpha = tl.exp2(m_i - m_ij)
    p = tl.exp2(scores - m_ij[:, None])
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(latents.dtype), latents, acc, input_precision="ieee")
    return m_ij, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def load_latents(
    latent_pool,  # [P * S, C + R], or SCALED uint8[P * S, C]
    scales,  # float32[P * S, G]; unused without SCALED
    slot,  # int64[BLOCK]
    seen,  # bool[BLOCK, 1]
    dtype: tl.constexpr,  # of the result
    FIRST: tl.constexpr,  # component of the latents
    WIDTH: tl.constexpr,  # components, a power of two
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,  # G
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Components of the latents at some slots [BLOCK, WIDTH]; of others zeros."""
    components = FIRST + tl.arange(0, WIDTH)
    if SCALED:
        # groups of these components
        OWN: tl.constexpr = max(GROUPS * WIDTH // RANK, 1)  # type: ignore[assignment]
        at_latent = (latent_pool + slot * RANK)[:, None] + components[None, :]
        bits = tl.load(at_latent, mask=seen, other=0).to(tl.float8e4nv, bitcast=True)
        groups = FIRST * GROUPS // RANK + tl.arange(0, OWN)
        at_scale = (scales + slot * GROUPS)[:, None] + groups[None, :]
        own = tl.load(at_scale, mask=seen, other=0.0)
        # scales of single components would fill as many registers as these
        by_group = tl.reshape(bits.to(tl.float32), (BLOCK, OWN, WIDTH // OWN)) * own[:, :, None]
        values = tl.reshape(by_group, (BLOCK, WIDTH))
    else:
        at_latent = (latent_pool + slot * (RANK + ROPE))[:, None] + components[None, :]
        values = tl.load(at_latent, mask=seen, other=0.0)
    return values.to(dtype)


@triton.jit
def load_keys(
    latent_pool,  # [P * S, C + R]; unused if SCALED
    rope_pool,  # [P * S, R]; unused without SCALED
    slot,  # int64[BLOCK]
    components,  # int32[R]
    seen,  # bool[BLOCK, 1]
    dtype: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The rotated keys at some slots; of others zeros."""
    if SCALED:
        at_key = (rope_pool + slot * ROPE)[:, None] + components[None, :]
    else:
        at_key = (latent_pool + slot * (RANK + ROPE) + RANK)[:, None] + components[None, :]
    return tl.load(at_key, mask=seen, other=0.0).to(dtype)


@triton.jit
def _append_and_attend(
    q_latent,  # [B, N, C]
    q_rope,  # [B, N, R]
    entries,  # [B, C + R]; SCALED: uint8[B, C], their latents as pages have them
    pages,  # [P, S, C + R]; SCALED: uint8[P, S, C]
    page_table,  # int32[B, M]
    seq_lens,  # int32[B]
    scales,  # float32[P, S, G]; this and the next three are unused without SCALED
    rope_pages,  # [P, S, R]
    new_scales,  # float32[B, G]
    new_rope,  # [B, R]
    out,  # [B, N, C]; with splits float32[B, SPLITS, N, C], without the division by l_i
    m_l,  # float32[B, SPLITS, 2, N]: m_i, l_i; unused with one split
    table_width,  # M
    SCALE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # of a CTA
    RANK: tl.constexpr,  # C
    ROPE: tl.constexpr,  # R
    GROUPS: tl.constexpr,  # G, a power of two
    SCALED: tl.constexpr,  # latents have 8 bits: see ``lib.latent_pages``
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens per loop iteration
):
    split = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.program_id(2)
    ENTRY: tl.constexpr = RANK + ROPE
    length = tl.load(seq_lens + row)
    is_row = length > 0  # padding is computed as a row of one token and yields zeros
    last = tl.maximum(length - 1, 0)
    split_size = _split_size(last, SPLITS, BLOCK)
    start = split * split_size
    if start > tl.maximum(last - 1, 0):  # the splits with tokens come first; there is at least one
        return
    end = tl.minimum(start + split_size, last)

    heads = tile * HEADS + tl.arange(0, HEADS)
    components = tl.arange(0, RANK)
    rope_components = tl.arange(0, ROPE)
    keys = tl.arange(0, BLOCK)
    in_heads = (heads < NUM_HEADS)[:, None]
    at_heads = row * NUM_HEADS + heads
    at_latent = at_heads[:, None] * RANK + components[None, :]
    query = tl.load(q_latent + at_latent, mask=in_heads, other=0.0)
    at_rope = at_heads[:, None] * ROPE + rope_components[None, :]
    query_rope = tl.load(q_rope + at_rope, mask=in_heads, other=0.0)

    m_i = tl.full((HEADS,), float("-inf"), tl.float32)
    l_i = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, RANK), tl.float32)
    page_ids = page_table + row.to(tl.int64) * table_width
    for first in range(start, end, BLOCK):
        position = first + keys
        visible = position < end
        page = tl.load(page_ids + position // PAGE_SIZE, mask=visible, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE  # offsets exceed int32
        seen = visible[:, None]
        latents = load_latents(
            pages, scales, slot, seen, query.dtype, 0, RANK, RANK, ROPE, GROUPS, SCALED, BLOCK
        )
        k_rope = load_keys(
            pages, rope_pages, slot, rope_components, seen, query.dtype, RANK, ROPE, SCALED
        )
        m_i, l_i, acc = attend_block(
            query, query_rope, latents, k_rope, visible, m_i, l_i, acc, SCALE
        )
    if end == last:  # the new token, as a block of one
        if tile == 0:
            page = tl.load(page_ids + last // PAGE_SIZE).to(tl.int64)
            slot = page * PAGE_SIZE + last % PAGE_SIZE
            if SCALED:
                groups = tl.arange(0, GROUPS)
                latent = tl.load(entries + row * RANK + components)
                tl.store(pages + slot * RANK + components, latent, mask=is_row & (components >= 0))
                scale = tl.load(new_scales + row * GROUPS + groups)
                tl.store(scales + slot * GROUPS + groups, scale, mask=is_row & (groups >= 0))
                key = tl.load(new_rope + row * ROPE + rope_components)
                at_key = rope_pages + slot * ROPE + rope_components
            else:
                latent = tl.load(entries + row * ENTRY + components).to(pages.dtype.element_ty)
                at_slot = pages + slot * ENTRY + components
                tl.store(at_slot, latent, mask=is_row & (components >= 0))
                key = tl.load(entries + row * ENTRY + RANK + rope_components)
                key = key.to(pages.dtype.element_ty)
                at_key = pages + slot * ENTRY + RANK + rope_components
            tl.store(at_key, key, mask=is_row & (rope_components >= 0))
        visible = keys == 0
        seen = visible[:, None]
        own = row.to(tl.int64) + keys * 0
        latents = load_latents(
            entries, new_scales, own, seen, query.dtype, 0, RANK, RANK, ROPE, GROUPS, SCALED, BLOCK
        )
        k_rope = load_keys(
            entries, new_rope, own, rope_components, seen, query.dtype, RANK, ROPE, SCALED
        )
        if not SCALED:  # as the pages will have it
            latents = latents.to(pages.dtype.element_ty).to(query.dtype)
            k_rope = k_rope.to(pages.dtype.element_ty).to(query.dtype)
        m_i, l_i, acc = attend_block(
            query, query_rope, latents, k_rope, visible, m_i, l_i, acc, SCALE
        )

    if SPLITS == 1:
        result = tl.where(is_row, acc / l_i[:, None], 0.0)
        tl.store(out + at_latent, result.to(out.dtype.element_ty), mask=in_heads)
    else:
        at_split = row * SPLITS + split
        at_m = m_l + at_split * 2 * NUM_HEADS + heads
        tl.store(at_m, m_i, mask=heads < NUM_HEADS)
        tl.store(at_m + NUM_HEADS, l_i, mask=heads < NUM_HEADS)
        at_acc = (at_split.to(tl.int64) * NUM_HEADS + heads)[:, None] * RANK + components[None, :]
        tl.store(out + at_acc, acc, mask=in_heads)


@triton.jit
def _merge_splits(
    accs,  # float32[B, SPLITS, N, C]
    m_l,  # float32[B, SPLITS, 2, N]: m_i, l_i
    seq_lens,  # int32[B]
    out,  # [B, N, C]
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,  # of ``_append_and_attend``
    AT_A_TIME: tl.constexpr,
    COMPONENTS: tl.constexpr,  # of a CTA
):
    head = tl.program_id(0)
    row = tl.program_id(2)
    length = tl.load(seq_lens + row)
    last = tl.maximum(length - 1, 0)
    used = tl.maximum(tl.cdiv(last, _split_size(last, SPLITS, BLOCK)), 1)
    components = tl.program_id(1) * COMPONENTS + tl.arange(0, COMPONENTS)
    m_i = tl.full((1,), float("-inf"), tl.float32)
    l_i = tl.zeros((1,), tl.float32)
    acc = tl.zeros((COMPONENTS,), tl.float32)
    for first in range(0, used, AT_A_TIME):
        split = first + tl.arange(0, AT_A_TIME)
        is_used = split < used
        at_split = row * SPLITS + split
        at_m = m_l + at_split * 2 * NUM_HEADS + head
        m_of_splits = tl.load(at_m, mask=is_used, other=float("-inf"))
        l_of_splits = tl.load(at_m + NUM_HEADS, mask=is_used, other=0.0)
        at_acc = accs + (at_split.to(tl.int64) * NUM_HEADS + head)[:, None] * RANK
        of_splits = tl.load(at_acc + components[None, :], mask=is_used[:, None], other=0.0)
        m_ij = tl.maximum(m_i, tl.max(m_of_splits, 0))
        before = tl.exp2(m_i - m_ij)
        weights = tl.exp2(m_of_splits - m_ij)
        l_i = l_i * before + tl.sum(l_of_splits * weights, 0)
        acc = acc * before + tl.sum(of_splits * weights[:, None], 0)
        m_i = m_ij
    result = tl.where(length > 0, acc / l_i, 0.0)
    at_out = out + (row * NUM_HEADS + head) * RANK + components
    tl.store(at_out, result.to(out.dtype.element_ty))


def latent_decode(
    args: LatentDecodeArgs,
) -> tuple[jax.Array, ...]:  # [B, N, C] and the pools
    """See ``latent_decode.api``."""
    return launch_with(launch.choose_config(args), args)


def launch_with(
    config: launch.TritonConfig,
    args: LatentDecodeArgs,
) -> tuple[jax.Array, ...]:  # [B, N, C] and the pools
    """``latent_decode`` with a given configuration; the tuner calls it too."""
    (b, n, rank), splits = args.q_latent.shape, config.splits
    is_split = splits > 1
    partials = jax.ShapeDtypeStruct((b, splits, n, rank), jnp.float32)
    pools: Any = pools_of(args)
    new, is_scaled = appended(args.entries, pools), len(pools) > 1
    pools = tuple(map(jax.new_ref, pools))  # jax-triton updates a Ref in place
    unused = (args.seq_lens,) * 2  # placeholders for arrays that the kernel does not read
    out, m_l = jt.triton_call(
        args.q_latent,
        args.q_rope,
        new[0],
        pools[0],
        args.page_table,
        args.seq_lens,
        *(pools[1:] or unused),
        *(new[1:] or unused),
        kernel=_append_and_attend,
        out_type=(
            partials if is_split else args.q_latent,
            jax.ShapeDtypeStruct((b, splits, 2, n) if is_split else (1,), jnp.float32),
        ),
        grid=(splits, -(-n // config.heads), b),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        table_width=args.page_table.shape[1],
        SCALE=args.scale * math.log2(math.e),
        NUM_HEADS=n,
        HEADS=config.heads,
        RANK=rank,
        ROPE=args.q_rope.shape[2],
        GROUPS=1 if args.scales is None else args.scales.shape[2],
        SCALED=is_scaled,
        PAGE_SIZE=args.pages.shape[1],
        SPLITS=splits,
        BLOCK=config.block,
    )
    if is_split:
        merge = launch.MergeConfig.of(splits, rank)
        out = jt.triton_call(
            out,
            m_l,
            args.seq_lens,
            kernel=_merge_splits,
            out_type=args.q_latent,
            grid=(n, rank // merge.components, b),
            num_warps=4,
            num_stages=1,
            NUM_HEADS=n,
            RANK=rank,
            SPLITS=splits,
            BLOCK=config.block,
            AT_A_TIME=merge.splits,
            COMPONENTS=merge.components,
        )
    return out, *map(jax.freeze, pools)
