"""kv_append in Triton: one launch for both pools, in place. A CTA copies a tile of one token."""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.page_scales import Pools, pools_of
from pallas_kernels.lib.page_scales_triton import rounded, scales_of

MAX_TILE = 1024  # components of a CTA


@triton.jit
def _append(
    k,  # [T, K * H]
    v,  # [T, K * H]
    k_pages,  # [P, S, K * H]
    v_pages,  # [P, S, K * H]
    slot_mapping,  # int32[T]
    WIDTH: tl.constexpr,  # K * H
    WIDTH_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    component = tl.program_id(1) * WIDTH_TILE + tl.arange(0, WIDTH_TILE)
    inside = component < WIDTH
    slot = tl.load(slot_mapping + token).to(tl.int64)  # offsets exceed int32
    source = token * WIDTH + component
    target = slot * WIDTH + component
    key = tl.load(k + source, mask=inside)
    value = tl.load(v + source, mask=inside)
    tl.store(k_pages + target, key.to(k_pages.dtype.element_ty), mask=inside)
    tl.store(v_pages + target, value.to(v_pages.dtype.element_ty), mask=inside)


@triton.jit
def _append_rounded(
    k,  # [T, K, H]
    v,  # [T, K, H]
    k_pages,  # uint8[P, S, K, H]
    v_pages,  # uint8[P, S, K, H]
    k_scales,  # float32[P, S, K]
    v_scales,  # float32[P, S, K]
    slot_mapping,  # int32[T]
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """A CTA rounds one head of a token to 8 bits."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM_TILE)
    inside = dims < HEAD_DIM
    slot = tl.load(slot_mapping + token).to(tl.int64)  # offsets exceed int32
    source = (token * NUM_KV_HEADS + head) * HEAD_DIM + dims
    at_scale = slot * NUM_KV_HEADS + head
    target = at_scale * HEAD_DIM + dims
    key = tl.load(k + source, mask=inside, other=0.0)
    value = tl.load(v + source, mask=inside, other=0.0)
    key_scale = scales_of(key, 0)
    value_scale = scales_of(value, 0)
    tl.store(k_scales + at_scale, key_scale)
    tl.store(v_scales + at_scale, value_scale)
    tl.store(k_pages + target, rounded(key, key_scale).to(tl.uint8, bitcast=True), mask=inside)
    tl.store(v_pages + target, rounded(value, value_scale).to(tl.uint8, bitcast=True), mask=inside)


def kv_append(args: KvAppendArgs) -> Pools:
    """See ``kv_append.api``."""
    tokens, num_kv_heads, h = args.k.shape
    if args.k_scales is not None:
        return _rounded(args)
    width = num_kv_heads * h
    tile = min(power_of_two(width), MAX_TILE)
    # jax-triton updates a Ref in place
    k_ref, v_ref = jax.new_ref(args.k_pages), jax.new_ref(args.v_pages)
    jt.triton_call(
        args.k,
        args.v,
        k_ref,
        v_ref,
        args.slot_mapping,
        kernel=_append,
        out_type=(),
        grid=(tokens, -(-width // tile)),
        num_warps=max(1, tile // 256),
        num_stages=1,
        WIDTH=width,
        WIDTH_TILE=tile,
    )
    return jax.freeze(k_ref), jax.freeze(v_ref)


def _rounded(args: KvAppendArgs) -> Pools:
    """The append to 8-bit pages."""
    tokens, num_kv_heads, h = args.k.shape
    pools = tuple(map(jax.new_ref, pools_of(args)))
    jt.triton_call(
        args.k,
        args.v,
        *pools,
        args.slot_mapping,
        kernel=_append_rounded,
        out_type=(),
        grid=(tokens, num_kv_heads),
        num_warps=1,
        num_stages=1,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=h,
        DIM_TILE=power_of_two(h),
    )
    return tuple(map(jax.freeze, pools))
