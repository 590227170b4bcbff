"""Which calls the Triton kernel of qk_rope_append supports, and its tile size.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton

MAX_HEAD_DIM = 512
MIN_CTAS = 256  # about two per SM of an H100 or H200
MAX_HEADS = 8  # per CTA


def supports(
    qkv: jax.Array,  # [T, N + 2K, H]
    cos: jax.Array,  # float32[T, H / 2]
    sin: jax.Array,  # float32[T, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    slot_mapping: jax.Array,  # int32[T]
    *,
    eps: float,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del cos, sin, qk_norms, v_pages, slot_mapping, eps
    if qkv.shape[2] > MAX_HEAD_DIM:
        return f"head_dim {qkv.shape[2]} is above {MAX_HEAD_DIM}"
    return unfit_for_triton(qkv, k_pages)


def heads_per_cta(tokens: int, heads: int) -> int:
    """As many as leave enough CTAs to fill the GPU; a power of two. Not yet timed."""
    count = MAX_HEADS
    while count > 1 and tokens * heads < MIN_CTAS * count:
        count //= 2
    return count
