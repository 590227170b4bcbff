"""Which calls the Triton kernel of paged_decode takes, and how it cuts them up.

Owns: ``supports``, ``Launch``, ``choose`` (a tuned choice, else a rule). Needs no Triton, so that a
machine without it can ask. Must not know: the kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import jax

from pallas_kernels import tuned
from pallas_kernels.checks import unfit_for_triton
from pallas_kernels.paged_decode.cases import CASES
from pallas_kernels.shapes import PagedCase
from pallas_kernels.tiles import power_of_two

HEAD_DIMS = (16, 256)  # smallest and largest
LARGEST_GROUP = 64

COMBINE_WARPS = 2
PROGRAMS = 256  # two on each multiprocessor of an H100 or H200 (132), as a power of two
BLOCK_BYTES = 16384  # of keys in one step, as wide as queries: 64 keys of a bf16 head of 128
BLOCKS = (16, 64)  # fewest and most keys of a step: 128 of a narrow head spill registers


@dataclass(frozen=True)
class Launch:
    """How a call is cut up. ``block``: keys a step, a power of two."""

    splits: int
    block: int
    num_warps: int = 4
    num_stages: int = 5


def supports(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del v_pages, page_table, seq_lens, scale, window
    (_, n, h), num_kv_heads = q.shape, k_pages.shape[2]
    if not HEAD_DIMS[0] <= h <= HEAD_DIMS[1]:
        return f"head_dim {h} is not between {HEAD_DIMS[0]} and {HEAD_DIMS[1]}"
    if n // num_kv_heads > LARGEST_GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {LARGEST_GROUP} may"
    return unfit_for_triton(q, k_pages)


def by_rule(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """Spans enough to fill the chip; blocks and stages that leave room for three programs on a
    multiprocessor. Chosen from the compiler's report. On an H200 ``append_decode``, whose loop is
    the same, is up to 30 % faster by choices of its own (``append_decode/tuned``).
    """
    (b, _, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    row_bytes = power_of_two(h) * q.dtype.itemsize
    block = min(max(BLOCK_BYTES // row_bytes, BLOCKS[0]), BLOCKS[1])
    longest = page_table.shape[1] * page_size
    splits = min(PROGRAMS // (b * num_kv_heads), -(-longest // block))
    return Launch(
        splits=power_of_two(max(splits, 1) + 1) // 2,
        block=block,
        # Five keep two blocks in flight, since a block's page ids are a load of their own. In
        # float32, where products leave the matrix units, that spills registers.
        num_stages=5 if q.dtype.itemsize <= 2 else 3,
    )


def shapes_of(case: PagedCase) -> Hashable:
    """What ``choose`` knows of a case's call."""
    heads = case.heads
    rows = len(case.seq_lens) + case.padding
    sizes = (rows, heads.num_heads, heads.num_kv_heads, heads.head_dim, case.page_size)
    return (*sizes, case.dtype, case.kv_dtype or case.dtype)


def choose(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
) -> Launch:
    """The tuned choice for a call of these shapes on this device, else that of the rule."""
    (b, n, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    shapes = (b, n, num_kv_heads, h, page_size, str(q.dtype), str(k_pages.dtype))
    choice = tuned.lookup("paged_decode", CASES, shapes_of, shapes)
    return Launch(**choice) if choice else by_rule(q, k_pages, page_table)
