"""Which calls the GPU kernels of paged_prefill support, and their tile sizes.

Owns: ``mosaic_supports``, ``split_supports``, ``triton_supports``, ``result_shapes``,
``TritonConfig``, ``choose_config`` (the tuned one, else that of a heuristic), ``split_config``,
``sizes_of``.
Imports neither Triton nor Mosaic, so it works where they are not installed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.harness import tuned
from pallas_kernels.lib.checks import not_hopper, unfit_for_triton, unfit_scales
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.shapes import PagedCase
from pallas_kernels.paged_prefill.cases import CASES
from pallas_kernels.paged_prefill.ref import FEW_TOKENS, MAX_PARTS, PrefillArgs

HEAD_DIMS = (16, 512)  # smallest and largest
# With all columns of wider values there are registers for 64 rows alone, for whose scores Triton
# has both warpgroups of a CTA compute the same matmul.
WIDE_HEAD = 256
MAX_GROUP = 16  # query heads per kv head: the smallest tile has one token of each
# A CTA reads all of query_start_loc at once, padded to at least this, so all buckets of up to 511
# rows share a kernel. The mask for the padding costs a dozen instructions per CTA.
STARTS_TILE = 512
MOSAIC_DTYPES = ("bfloat16", "float16")
MOSAIC_HEAD_DIMS = (64, 128)  # 256 would exceed shared memory
# The Mosaic kernel has the same tiles for all calls. 8192 tokens with a context of 8192 (32 query
# and 8 kv heads, head_dim 128, bfloat16) on an H200, us, with pages of 16 and of 64:
#   2 stages of 128 keys, as here               1015  1001
#   3 stages                                    1052  1061
#   3, all tiles of a head adjacent in the grid 1041  1050
#   3, softmax after both matmuls               1010  1054
#   3, no ping-pong of the warpgroups           1061  1013
#   6 stages of 64 keys                         1146  1120
#   without dedicated memory warps              1089   985
#   the Triton kernel                           1497  1541
# These had a CTA for each tile. A persistent kernel, one CTA per SM, is faster for short contexts.
# As many stages as fit, pages of 16, us (in parentheses with a CTA for each tile), in one run:
#   32 prompts of 256 tokens   116 (186)    4096 tokens   297 (321)
#   8 of 1024                  208 (290)    8192         1087 (1127)
#   1024 tokens               30.0 (35.7)   512          17.0 (18.9)
# Later maxima and sums were folded, and the ping-pong was removed. 8192 tokens back to back and
# after a pause, us, all in one run except the last line (back to back the GPU is at its power
# limit):
#   context of        8192, back to back   paused   16384, back to back   paused
#   before                           950     1020                  3008     2838
#   folded                           927      965                  2795     2701
#   folded, no ping-pong             880      976                  2803     2605
#   folded, queries in registers     903      975                  2820     2616
# Later two CTAs shared page loads by multicast, us back to back (in parentheses without): 8192
# tokens of context 16384 2817 (2998), of 8192 1008 (1035); 4096 tokens 270 (274), 1024 24.6 (25.1),
# 512 14.4 (14.7), 32 prompts of 256 84.0 (83.5).
# With head_dim 64 a block has half the matmuls of 128 for the same exponentials. A third compute
# warpgroup keeps the tensor cores busier; with a window its larger tiles see more keys in vain.
# 8192 tokens of 64 query and 8 kv heads, us on an H100, two runs: 1499 and 1527 with two, 1277 and
# 1280 with three; with a window of 128 171 and 174 with two, 279 and 277 with three. Two and a
# quarter of the exponentials by polynomials: 1414 and 1436. Few tokens make too few of its tiles:
# the first token of gpt-oss-20b after 1024 was 0.4 ms later with three, after 8192 1.6 ms earlier.
MANY_TOKENS = 4096
BLOCK = 128  # keys per block
STAGES = 2  # blocks of keys, and of values, in flight
MMA_QUERIES = 64  # queries of a compute warpgroup: M of a wgmma
CLUSTER = 2  # CTAs, if a kv head has query heads for all their compute warpgroups
TOKEN_ALIGNMENT = 8  # TMA copies swizzled tiles from and to multiples of 8 tokens

FEW_STARTS_TILE = 64  # as STARTS_TILE
# A tile's last CTA reads the states of all its splits, 32 KB each.
MAX_SPLITS = 16
MIN_KEYS = 256  # of a split, if a context has as many
RESIDENT = 2  # CTAs of an SM, which heads of up to 128 have; splits of one tile need one
MERGED_COLUMNS, MERGED_SPLITS = 32, 6  # of a CTA at the same time; more of both would spill


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes and launch parameters of the Triton kernel.

    ``rows``: pairs of a token and a query head in a tile; ``block``: keys per loop iteration;
    ``value_columns``: components of values of a CTA (0: all), the others of which compute the same
    weights again. All are powers of two.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int
    value_columns: int = 0

    def value_tile(self, head_dim: int) -> int:
        """The columns of values of a CTA, also those of padding."""
        dim_tile = power_of_two(head_dim)
        return min(self.value_columns or dim_tile, dim_tile)


def sizes_of(
    q: jax.Array,  # [T, N, H]
    args: Any,  # the pages, the context and the settings of a ``PrefillArgs`` or ``DecodeArgs``
    tile: TritonConfig,
) -> dict[str, Any]:
    """The launch parameters that all Triton kernels of tiles have."""
    (_, n, h), (page_size, num_kv_heads) = q.shape, args.k_pages.shape[1:3]
    group = n // num_kv_heads
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "table_width": args.page_table.shape[1],
        "SCALE": args.scale * math.log2(math.e),
        "CAP": (args.cap or 0.0) / args.scale,
        "WINDOW": args.window or 0,
        "HAS_SINKS": args.sinks is not None,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": h,
        "DIM_TILE": power_of_two(h),
        "PAGE_SIZE": page_size,
        "ROWS": tile.rows,
        "TOKENS": tile.rows // group,
        "BLOCK": tile.block,
    }


@dataclass(frozen=True)
class SplitConfig:
    """Tile sizes and launch parameters of the Triton kernel with splits.

    ``splits``: of a tile at most, a power of two; ``ctas``: of each kv head and part of its values,
    one for each SM.
    """

    tile: TritonConfig
    splits: int
    ctas: int


def num_warpgroups(head_dim: int, window: int | None, num_tokens: int) -> int:
    """Compute warpgroups of a CTA of the Mosaic kernel."""
    return 3 if head_dim == 64 and window is None and num_tokens >= MANY_TOKENS else 2


def mosaic_supports(args: PrefillArgs) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    if args.cap is not None or args.slopes is not None or args.sink_values is not None:
        return "scores have a cap or a bias (ALiBi), or sinks have values"
    (t, _, h), dtype, page_size = args.q.shape, args.q.dtype, args.k_pages.shape[1]
    if str(dtype) not in MOSAIC_DTYPES or args.k_pages.dtype != dtype:
        return f"queries are {dtype} and pages {args.k_pages.dtype}, not the same 16-bit dtype"
    if h not in MOSAIC_HEAD_DIMS:
        return f"head_dim {h} is neither 64 nor 128"
    if page_size % 8 or BLOCK % page_size:
        return f"page_size {page_size} is not 8, 16, 32, 64 or 128"
    if t < MMA_QUERIES:
        return f"{t} queries are fewer than the {MMA_QUERIES} of a tile"
    if args.scale <= 0.0:
        return f"scale {args.scale} is not positive"
    return not_hopper()


def result_shapes(args: PrefillArgs) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    return jax.ShapeDtypeStruct(args.q.shape, args.q.dtype)


def triton_supports(args: PrefillArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    (_, n, h), num_kv_heads = args.q.shape, args.k_pages.shape[2]
    if args.slopes is not None or args.sink_values is not None:
        return "scores have a bias (ALiBi), or sinks have values"
    if not HEAD_DIMS[0] <= h <= HEAD_DIMS[1]:
        return f"head_dim {h} is not between {HEAD_DIMS[0]} and {HEAD_DIMS[1]}"
    if n // num_kv_heads > MAX_GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {MAX_GROUP} may"
    if args.scale <= 0.0:
        return f"scale {args.scale} is not positive"
    return unfit_scales(args.q, args.k_pages) or unfit_for_triton(args.q, args.k_pages)


def most_keys(args: PrefillArgs, tokens: int) -> int:
    """The largest number of keys that a tile of so many tokens sees."""
    in_table = args.page_table.shape[1] * args.k_pages.shape[1]
    return in_table if args.window is None else min(in_table, args.window + tokens - 1)


def split_config(args: PrefillArgs) -> SplitConfig:
    """The launch with splits: as many as fill the GPU if a single tile has queries.

    From the compiler's report. With one split, ``split_supports`` refuses the call.
    """
    (_, n, h), num_kv_heads = args.q.shape, args.k_pages.shape[2]
    tile = _split_tile(args)
    parts = power_of_two(h) // tile.value_tile(h)
    ctas = max(current_device().num_sms // (num_kv_heads * parts), 1)
    keys = most_keys(args, tile.rows // (n // num_kv_heads))
    splits = max(min(ctas, keys // MIN_KEYS, MAX_SPLITS), 1)
    return SplitConfig(tile, power_of_two(splits + 1) // 2, ctas)


def _split_tile(args: PrefillArgs) -> TritonConfig:
    """Tiles of 64 rows, as there are few queries. CTAs divide the values of wide heads."""
    h, is_scaled = args.q.shape[2], args.k_scales is not None
    if args.q.dtype.itemsize > 2 or (h > WIDE_HEAD and is_scaled):
        return heuristic_config(args.q, is_scaled=is_scaled)
    if h > WIDE_HEAD:
        return TritonConfig(64, 32, 8, 3, 128)
    if h > 128:  # 64 rows would spill with 8-bit pages
        return TritonConfig(32, 32, 4, 3, 128) if is_scaled else TritonConfig(64, 64, 8, 5, 128)
    return TritonConfig(64, 64, 4, 5)


def split_supports(args: PrefillArgs) -> str | None:
    """Why the Triton kernel with splits cannot run the call or gains nothing, or None."""
    if reason := triton_supports(args):
        return reason
    if args.q.shape[0] > FEW_TOKENS:
        return f"{args.q.shape[0]} queries are more than {FEW_TOKENS}"
    if split_config(args).splits == 1:
        return f"contexts have less than {2 * MIN_KEYS} keys, or kv heads fill the GPU"
    return None


def split_workspace(args: PrefillArgs) -> int:
    """The bytes of the states of all splits."""
    (t, n, h), splits = args.q.shape, split_config(args).splits
    return 4 * splits * t * n * (power_of_two(h) + 2 * MAX_PARTS)


def heuristic_config(q: jax.Array, *, is_scaled: bool = False) -> TritonConfig:  # [T, N, H]
    """Tiles of 128 rows if these fill the GPU, else of 64.

    Chosen from the compiler's report; 367 to 403 TFLOP/s at 8,192 tokens on an H200.
    """
    t, n, h = q.shape
    value_columns = WIDE_HEAD if h > WIDE_HEAD else 0
    if q.dtype.itemsize > 2:  # without tensor cores larger tiles would spill registers
        return TritonConfig(16, 16, 4, 3, value_columns)
    if h > WIDE_HEAD and is_scaled:  # all larger tiles spill; not timed
        return TritonConfig(32, 32, 8, 2, value_columns)
    if h > WIDE_HEAD:
        # 8192 tokens of Gemma 4 26B-A4B on an H200, us: 4833; with two stages, which wait for page
        # ids, 5238; 64 rows with all columns 6115; 64 rows on four warps 10897.
        return TritonConfig(128, 32, 8, 3, value_columns)
    if h > 128:  # acc of 64 rows on four warps would spill
        # so would all columns of 8-bit values, which are converted; half of them were not timed
        value_columns = 128 if is_scaled else 0
        return TritonConfig(128, 64, 8, 3, value_columns)
    # The steps of converting 8-bit pages and their barriers are those of a block: 428 instructions
    # of a warp for 64 keys with 128 in a block, 536 with 64.
    block = 128 if h <= 64 or is_scaled else 64
    # Five stages keep two blocks in flight, since the page ids of a block are a separate load.
    if t * n >= 128 * current_device().num_sms:
        return TritonConfig(rows=128, block=block, num_warps=8, num_stages=5)
    return TritonConfig(rows=64, block=64, num_warps=4, num_stages=5)


def shapes_of(case: PagedCase) -> Hashable:
    """The key of a case's tuned choice."""
    heads = case.heads
    tokens = sum(case.query_lens) + case.padding
    sizes = (tokens, len(case.seq_lens), heads.num_heads, heads.num_kv_heads, heads.head_dim)
    return (*sizes, case.page_size, case.dtype, case.kv_dtype or case.dtype)


def choose_config(args: PrefillArgs) -> TritonConfig:
    """The tuned config for a call of these shapes on this device, else the heuristic one."""
    (t, n, h), (page_size, num_kv_heads) = args.q.shape, args.k_pages.shape[1:3]
    sizes = (t, args.seq_lens.shape[0], n, num_kv_heads, h, page_size)
    shapes = (*sizes, str(args.q.dtype), str(args.k_pages.dtype))
    choice = tuned.lookup("paged_prefill", CASES, shapes_of, shapes)
    return (
        TritonConfig(**choice)
        if choice
        else heuristic_config(args.q, is_scaled=args.k_scales is not None)
    )
