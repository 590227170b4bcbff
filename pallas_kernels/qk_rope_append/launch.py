"""Which calls the Triton kernel of qk_rope_append takes, and how it cuts them up.

Needs no Triton, so that a machine without it can ask.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import unfit_for_triton

LARGEST_HEAD_DIM = 512
PROGRAMS = 256  # two on each multiprocessor of an H100 or H200
MOST_HEADS = 8  # of one program


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
    if qkv.shape[2] > LARGEST_HEAD_DIM:
        return f"head_dim {qkv.shape[2]} is above {LARGEST_HEAD_DIM}"
    return unfit_for_triton(qkv, k_pages)


def heads_per_program(tokens: int, heads: int) -> int:
    """As many as leave enough programs to fill the chip; a power of two. Not yet timed."""
    count = MOST_HEADS
    while count > 1 and tokens * heads < PROGRAMS * count:
        count //= 2
    return count
