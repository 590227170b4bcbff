"""kv_append in Triton: one launch for both pools, in place. A program moves one token's piece."""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.numerics import power_of_two

LARGEST_PIECE = 1024  # components of one program


@triton.jit
def _append(
    k,  # [T, K * H]
    v,  # [T, K * H]
    k_pages,  # [P, S, K * H]
    v_pages,  # [P, S, K * H]
    slot_mapping,  # int32[T]
    WIDTH: tl.constexpr,  # K * H
    PIECE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    component = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = component < WIDTH
    slot = tl.load(slot_mapping + token).to(tl.int64)  # bytes pass 2**31
    source = token * WIDTH + component
    target = slot * WIDTH + component
    key = tl.load(k + source, mask=inside)
    value = tl.load(v + source, mask=inside)
    tl.store(k_pages + target, key.to(k_pages.dtype.element_ty), mask=inside)
    tl.store(v_pages + target, value.to(v_pages.dtype.element_ty), mask=inside)


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
) -> tuple[jax.Array, jax.Array]:
    """See ``kv_append.api``."""
    tokens, num_kv_heads, h = k.shape
    width = num_kv_heads * h
    piece = min(power_of_two(width), LARGEST_PIECE)
    k_ref, v_ref = jax.new_ref(k_pages), jax.new_ref(v_pages)  # jax-triton's word for in place
    jt.triton_call(
        k,
        v,
        k_ref,
        v_ref,
        slot_mapping,
        kernel=_append,
        out_type=(),
        grid=(tokens, -(-width // piece)),
        num_warps=max(1, piece // 256),
        num_stages=1,
        WIDTH=width,
        PIECE=piece,
    )
    return jax.freeze(k_ref), jax.freeze(v_ref)
