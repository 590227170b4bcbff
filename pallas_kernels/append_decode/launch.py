"""Which calls the Triton kernel of append_decode supports, and its tile sizes.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness import tuned
from pallas_kernels.lib.checks import unfit_for_triton, unfit_scales
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.shapes import PagedCase

HEAD_DIMS = (16, 512)  # smallest and largest
MAX_GROUP = 64

CTAS = 256  # about two per SM of an H100 or H200 (132 SMs); a power of two
# A row of 4 kv heads: 42.2 and 47.1 us at 1,056 and 16,416 keys with 64, 22.8 and 29.8 with 32
# (H100): the last CTA to arrive merges the results of all.
MAX_SPLITS = 32
BLOCK_BYTES = 16384  # of keys per block, in the dtype of queries: 64 keys of a bf16 head of 128
# Of a split of wide heads: one CTA reads and merges the states of all, 16 KB each. One row of
# Gemma 4 26B-A4B, 8 query heads of 512 for each kv head and 1,056 keys, us on an H200: 70.6 with 64
# keys in each of 32 splits, all of which were read, 42.0 with 128.
MIN_KEYS = 128
WIDE_HEAD = 256  # queries of wider heads need eight warps' registers
BLOCKS = (16, 64)  # smallest and largest block; 128 keys of a narrow head spill registers


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters. ``block``: keys per loop iteration, a power of two;
    ``min_keys``: keys of a split at least, if a context has as many (0: those of a block).
    """

    splits: int
    block: int
    num_warps: int = 4
    num_stages: int = 5
    min_keys: int = 0


def shapes_of(case: PagedCase) -> Hashable:
    """The key of a case's tuned choice."""
    heads = case.heads
    rows = len(case.seq_lens) + case.padding
    sizes = (rows, heads.num_heads, heads.num_kv_heads, heads.head_dim, case.page_size)
    return (*sizes, case.dtype, case.kv_dtype or case.dtype, case.window)


def most_keys(args: DecodeArgs) -> int:
    """The largest number of keys in the pages that a row reads; some may be before its window."""
    page_size = args.k_pages.shape[1]
    in_table = args.page_table.shape[1] * page_size
    return in_table if args.window is None else min(in_table, args.window + page_size - 2)


def call_shapes(args: DecodeArgs) -> Hashable:
    """The key of a call's tuned choice, as ``shapes_of`` for a case."""
    (b, n, h), (page_size, num_kv_heads) = args.queries.shape, args.k_pages.shape[1:3]
    dtypes = str(args.qkv.dtype), str(args.k_pages.dtype)
    return (b, n, num_kv_heads, h, page_size, *dtypes, args.window)


def supports(args: DecodeArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    (_, n, h), num_kv_heads = args.queries.shape, args.k_pages.shape[2]
    if args.slopes is not None or args.sink_values is not None:
        return "scores have a bias (ALiBi), or sinks have values"
    if not HEAD_DIMS[0] <= h <= HEAD_DIMS[1]:
        return f"head_dim {h} is not between {HEAD_DIMS[0]} and {HEAD_DIMS[1]}"
    if n // num_kv_heads > MAX_GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {MAX_GROUP} may"
    return unfit_scales(args.qkv, args.k_pages) or unfit_for_triton(args.qkv, args.k_pages)


def heuristic_config(args: DecodeArgs) -> TritonConfig:
    """Splits enough to fill the GPU; blocks and stages such that three CTAs fit on an SM.

    Chosen from the compiler's report; tuned choices are up to 30 % faster on an H200.
    """
    (b, _, h), num_kv_heads = args.qkv.shape, args.k_pages.shape[2]
    row_bytes = power_of_two(h) * args.qkv.dtype.itemsize
    block = min(max(BLOCK_BYTES // row_bytes, BLOCKS[0]), BLOCKS[1])
    splits = min(CTAS // (b * num_kv_heads), -(-most_keys(args) // block), MAX_SPLITS)
    is_scaled = args.k_scales is not None
    if h > WIDE_HEAD and args.qkv.dtype.itemsize <= 2:
        block *= 4 if is_scaled else 2  # 32 keys in 8-bit pages would spill
        splits = min(splits, -(-most_keys(args) // block))
        return TritonConfig(power_of_two(max(splits, 1) + 1) // 2, block, 8, 3, MIN_KEYS)
    # float32 does not use tensor cores. With the rotation of queries only the smallest block fits
    # in registers, and more than three stages would spill.
    on_tensor_cores = args.qkv.dtype.itemsize <= 2
    return TritonConfig(
        splits=power_of_two(max(splits, 1) + 1) // 2,
        block=block if on_tensor_cores else BLOCKS[0],
        # 64 rows of 1,056 tokens in 8-bit pages took an H200 56.9 us with two warps, 80.0 with four
        num_warps=2 if is_scaled and on_tensor_cores else 4,
        # Five keep two blocks in flight, since the page ids of a block are a separate load.
        num_stages=5 if on_tensor_cores else 3,
        min_keys=MIN_KEYS if h > WIDE_HEAD else 0,
    )


def choose_config(args: DecodeArgs) -> TritonConfig:
    """The tuned config for a call of these shapes on this device, else the heuristic one."""
    choice = tuned.lookup("append_decode", CASES, shapes_of, call_shapes(args))
    return TritonConfig(**choice) if choice else heuristic_config(args)
