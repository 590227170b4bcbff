"""kv_append in Triton: one launch for both pools, in place. A CTA copies a tile of one token."""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.kv_append.ref import KvAppendArgs
from pallas_kernels.lib.numerics import power_of_two

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


def kv_append(args: KvAppendArgs) -> tuple[jax.Array, jax.Array]:
    """See ``kv_append.api``."""
    tokens, num_kv_heads, h = args.k.shape
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
