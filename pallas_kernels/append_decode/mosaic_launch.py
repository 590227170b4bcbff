"""Which calls the Mosaic kernel of append_decode takes, and how it cuts them up.

Owns: ``supports``, ``Launch``, ``choose`` (a tuned choice, else a rule). Must not know: the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import tuned
from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.append_decode.launch import queries_of
from pallas_kernels.checks import not_hopper
from pallas_kernels.paged_decode.launch import shapes_of

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)
GROUP = 8  # query heads that the matrix units take at a time; fewer are padded
KEYS = 64  # that they take at a time: the least of a block
PAGE_SIZES = (8, 16, 32, 64)
STAGES = 3  # blocks on their way: 96 KB of a bf16 head of 128, so that two programs fit


@dataclass(frozen=True)
class Launch:
    """How a call is cut up.

    ``splits`` programs share a row and a kv head, block by block in turn. ``block``: keys of a
    step, a multiple of 64 and of the page size. ``stages`` blocks are on their way at once.
    """

    splits: int = 1
    block: int = KEYS
    stages: int = STAGES


def supports(
    qkv: jax.Array,  # [B, N + 2K, H]
    cos: jax.Array | None,  # float32[B, H / 2]
    sin: jax.Array | None,  # float32[B, H / 2]
    qk_norms: jax.Array | None,  # [2, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    arrivals: jax.Ref | None = None,
    *,
    scale: float,
    eps: float,
    window: int | None = None,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    del v_pages, page_table, seq_lens, arrivals, scale, eps
    _, n, h = queries_of(qkv, k_pages).shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    if str(qkv.dtype) not in DTYPES or k_pages.dtype != qkv.dtype:
        return f"heads are {qkv.dtype} and pages {k_pages.dtype}, not both of 16 bits and alike"
    if qk_norms is not None and qk_norms.dtype != qkv.dtype:
        return f"heads are {qkv.dtype} and norms {qk_norms.dtype}"
    if h not in HEAD_DIMS:
        return f"head_dim {h} is neither 64 nor 128"
    if n // num_kv_heads > GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {GROUP} may"
    if page_size not in PAGE_SIZES:
        return f"page_size {page_size} is not 8, 16, 32 or 64"
    if window is not None:
        return "it has no windows"
    if cos is None:
        return "it turns heads"
    return not_hopper()


def by_rule(
    qkv: jax.Array,  # [B, N + 2K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """One program for a row and kv head."""
    return Launch()


def choose(
    qkv: jax.Array,  # [B, N + 2K, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """The tuned choice for a call of these shapes on this device, else that of the rule."""
    return by_rule(qkv, k_pages, page_table)
