"""Which calls the GPU kernels of paged_prefill take, and how they cut them up.

Owns: ``mosaic_supports``, ``triton_supports``, ``results``, ``Launch``, ``choose`` (a tuned choice,
else a rule). Needs neither language, so that a machine without it can ask.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import tuned
from pallas_kernels.checks import not_hopper, unfit_for_triton
from pallas_kernels.device import current_device
from pallas_kernels.paged_prefill.cases import CASES
from pallas_kernels.shapes import PagedCase

HEAD_DIMS = (16, 256)  # smallest and largest
LARGEST_GROUP = 16  # query heads of a kv head: the smallest tile holds one token of each
# A program reads all of query_start_loc at once, padded to this or more: all buckets of up to 511
# rows share a kernel. What is too much is masked, a dozen instructions before any key is read.
STARTS_TILE = 512
MOSAIC_DTYPES = ("bfloat16", "float16")
MOSAIC_HEAD_DIMS = (64, 128)  # 256 would need more shared memory than there is
# The Mosaic kernel is cut up alike for all calls. 8192 tokens of context 8192 (32 query and 8 kv
# heads, head_dim 128, bfloat16) take an H200 so many microseconds, with pages of 16 and of 64:
#   2 steps of 128 keys, as here               1015  1001
#   3 steps                                    1052  1061
#   3, the tiles of one head side by side      1041  1050
#   3, softmax after both products             1010  1054
#   3, no turns at the matrix units            1061  1013
#   6 steps of 64 keys                         1146  1120
#   the kernel before it had loader warps      1089   985
#   the Triton kernel                          1497  1541
# These had a program for each tile. One for each multiprocessor, which takes tiles in turn, is
# better where they are short. Rows as many as a step has room for, pages of 16, in one run:
#   32 prompts of 256 tokens  116 for 186    4096 tokens  297 for 321
#   8 of 1024                 208 for 290    8192        1087 for 1127
#   1024 tokens              30.0 for 35.7    512        17.0 for 18.9
# Since then maxima and sums are folded, and no worker waits for its turn. 8192 tokens, in a row and
# after a rest, us, in one run, the last line in another (in a row the device is at its limit of
# power):
#   context of         8192, in a row   rested   16384, in a row   rested
#   before                        950     1020              3008     2838
#   folded                        927      965              2795     2701
#   folded, without turns         880      976              2803     2605
#   folded, queries in registers  903      975              2820     2616
# And since two programs load pages together, in turns, in a row: 8192 tokens of context 16384
# 2817 us for 2998, of 8192 1008 for 1035; 4096 tokens 270 for 274, 1024 24.6 for 25.1, 512 14.4
# for 14.7, 32 prompts of 256 84.0 for 83.5.
BLOCK = 128  # keys of a step
STEPS = 2  # blocks of keys, and of values, in flight
QUERIES = 64  # of one of its workers: the smallest and the fastest tile of a warpgroup's products
WORKERS = 2
CLUSTER = 2  # programs, where a kv head has query heads for all their workers
ALIGNED = 8  # tokens: TMA moves swizzled tiles from and to multiples of it


@dataclass(frozen=True)
class Launch:
    """How a call of the Triton kernel is cut up.

    ``rows``: pairs of a token and a query head in a tile; ``block``: keys a step. Powers of two.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int


def mosaic_supports(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
    window: int | None = None,
) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    del v_pages, page_table, seq_lens, query_start_loc, window
    (t, _, h), page_size = q.shape, k_pages.shape[1]
    if str(q.dtype) not in MOSAIC_DTYPES or k_pages.dtype != q.dtype:
        return f"queries are {q.dtype} and pages {k_pages.dtype}, not both of 16 bits and alike"
    if h not in MOSAIC_HEAD_DIMS:
        return f"head_dim {h} is neither 64 nor 128"
    if page_size % 8 or BLOCK % page_size:
        return f"page_size {page_size} is not 8, 16, 32, 64 or 128"
    if t < QUERIES:
        return f"{t} queries are fewer than the {QUERIES} of a tile"
    if scale <= 0.0:
        return f"scale {scale} is not positive"
    return not_hopper()


def results(
    q: jax.Array,  # [T, N, H]
    *_: Any,
    **static: Any,
) -> jax.ShapeDtypeStruct:
    """What a call returns, as shapes."""
    return jax.ShapeDtypeStruct(q.shape, q.dtype)


def triton_supports(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    query_start_loc: jax.Array,  # int32[R + 1]
    *,
    scale: float,
    window: int | None = None,
) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    del v_pages, page_table, seq_lens, query_start_loc, window
    (_, n, h), num_kv_heads = q.shape, k_pages.shape[2]
    if not HEAD_DIMS[0] <= h <= HEAD_DIMS[1]:
        return f"head_dim {h} is not between {HEAD_DIMS[0]} and {HEAD_DIMS[1]}"
    if n // num_kv_heads > LARGEST_GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {LARGEST_GROUP} may"
    if scale <= 0.0:
        return f"scale {scale} is not positive"
    return unfit_for_triton(q, k_pages)


def by_rule(q: jax.Array) -> Launch:  # [T, N, H]
    """Tiles of 128 rows where they fill the chip, of 64 where they do not.

    Chosen from the compiler's report; 367 to 403 TFLOP/s at 8,192 tokens on an H200.
    """
    t, n, h = q.shape
    if q.dtype.itemsize > 2:  # products leave the matrix units; larger tiles spill registers
        return Launch(rows=16, block=16, num_warps=4, num_stages=3)
    if h > 128:  # the sums of 64 rows on four warps would spill
        return Launch(rows=128, block=64, num_warps=8, num_stages=3)
    block = 128 if h <= 64 else 64
    # Five stages keep two blocks in flight, since a block's page ids are a load of their own.
    if t * n >= 128 * current_device().multiprocessors:
        return Launch(rows=128, block=block, num_warps=8, num_stages=5)
    return Launch(rows=64, block=64, num_warps=4, num_stages=5)


def shapes_of(case: PagedCase) -> Hashable:
    """What ``choose`` knows of a case's call."""
    heads = case.heads
    tokens = sum(case.query_lens) + case.padding
    sizes = (tokens, len(case.seq_lens), heads.num_heads, heads.num_kv_heads, heads.head_dim)
    return (*sizes, case.page_size, case.dtype, case.kv_dtype or case.dtype)


def choose(
    q: jax.Array,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    seq_lens: jax.Array,  # int32[R]
) -> Launch:
    """The tuned choice for a call of these shapes on this device, else that of the rule."""
    (t, n, h), (page_size, num_kv_heads) = q.shape, k_pages.shape[1:3]
    sizes = (t, seq_lens.shape[0], n, num_kv_heads, h, page_size)
    shapes = (*sizes, str(q.dtype), str(k_pages.dtype))
    choice = tuned.lookup("paged_prefill", CASES, shapes_of, shapes)
    return Launch(**choice) if choice else by_rule(q)
