"""Which calls the Mosaic kernel of append_decode supports, and its tile sizes.

The configuration of a call is the tuned one, else that of a heuristic.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.append_decode.launch import call_shapes, most_keys, shapes_of
from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.harness import tuned
from pallas_kernels.lib.checks import not_hopper, unfit_norms
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.numerics import power_of_two

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
WIDE_HEAD = 256  # two CTAs with two blocks each in flight exceed the shared memory of an SM
MAX_GROUP = 16  # query heads per kv head
MMA_HEADS = 8  # N of a wgmma is a multiple of this: the query heads of a kv head are padded to it
MMA_KEYS = 64  # M of a wgmma: the smallest block of keys
PAGE_SIZES = (8, 16, 32, 64)  # TMA writes swizzled tiles of 8 rows
CTAS_PER_SM = 2  # one attends while the other begins or ends
MAX_SPLITS = 8  # a cluster of 8 runs on every Hopper GPU; 16 were slower at 16,416 keys
# One row of Qwen3-30B-A3B, 32 CTAs: 10.0 and 20.6 us at 1,056 and 16,416 keys; the fastest Triton
# launches took 20.7 and 29.8 us (H100). Fewer were not timed.
MIN_CTAS = 16
IN_FLIGHT_BYTES = 192 << 10  # of an SM, for keys and values in flight; of wide heads in one CTA
LARGE_BLOCKS_BYTES = 128 << 10  # the same with large blocks, for one CTA per SM


@dataclass(frozen=True)
class MosaicConfig:
    """Tile sizes and grid.

    ``splits`` CTAs, a power of two, form a cluster and take the blocks of a row and kv head
    round-robin. ``block``: keys per step, a multiple of 64. ``stages`` blocks are in flight. The
    grid has at most ``max_clusters`` clusters, each of which loops over rows and kv heads.
    """

    splits: int
    block: int
    stages: int
    max_clusters: int


def group_tile(num_heads: int, num_kv_heads: int) -> int:
    """The query heads of a kv head, with those of padding."""
    return -(-num_heads // num_kv_heads // MMA_HEADS) * MMA_HEADS


def supports(args: DecodeArgs) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    if args.cap is not None or args.slopes is not None or args.sink_values is not None:
        return "scores have a cap or a bias (ALiBi), or sinks have values"
    (rows, n, h), dtype, norms = args.queries.shape, args.qkv.dtype, args.qk_norms
    page_size, num_kv_heads = args.k_pages.shape[1:3]
    if str(dtype) not in DTYPES or args.k_pages.dtype != dtype:
        return f"heads are {dtype} and pages {args.k_pages.dtype}, not the same 16-bit dtype"
    if norms is not None and (reason := unfit_norms(args.qkv, norms)):
        return reason
    if args.values == "keys" or not args.appends:
        return f"values are {args.values}, and tokens are {'' if args.appends else 'not '}appended"
    if h not in HEAD_DIMS:
        return f"head_dim {h} is not 64, 128 or 256"
    if n // num_kv_heads > MAX_GROUP:
        return f"{n // num_kv_heads} query heads share a kv head, at most {MAX_GROUP} may"
    if page_size not in PAGE_SIZES:
        return f"page_size {page_size} is not 8, 16, 32 or 64"
    if (ctas := rows * num_kv_heads * MAX_SPLITS) < MIN_CTAS:
        return (
            f"{ctas} CTAs leave most of the device idle, and a row has at most {MAX_SPLITS} splits"
        )
    return not_hopper()


def result_shapes(args: DecodeArgs) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of the results of a call."""
    pools = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (args.k_pages, args.v_pages))
    return args.queries, *pools


def heuristic_config(args: DecodeArgs) -> MosaicConfig:
    """Splits while each CTA has an SM for itself; then also larger blocks. For Qwen3-4B on an H200:

    With splits for two CTAs per SM, 8 rows took 17.7 us (12.2 with one). Blocks of 128 keys need
    fewer waits: a layer of one row took 80.4 us (86.0 with 64 keys) at 16,416 keys, and 61.8 (61.5)
    at 1,057. With more blocks in flight the next kernel does not fit on the SM: 63.8 us at 1,057
    keys. For 32 rows, two CTAs per SM, blocks of 128 keys took 44.9 us (40.9 with 64).
    """
    (b, _, h), num_kv_heads = args.qkv.shape, args.k_pages.shape[2]
    longest = most_keys(args)
    num_sms = current_device().num_sms
    fitting = num_sms // (b * num_kv_heads)
    splits = max(min(fitting, -(-longest // MMA_KEYS), MAX_SPLITS), 1)
    splits = power_of_two(splits + 1) // 2
    if h == WIDE_HEAD:
        stages = IN_FLIGHT_BYTES // _block_bytes(args, MMA_KEYS)
        # queries and states of more heads would exceed the shared memory by 6 KB
        stages -= splits > 1 and group_tile(args.queries.shape[1], num_kv_heads) > MMA_HEADS
        return MosaicConfig(splits, MMA_KEYS, stages, num_sms)
    one_cta_per_sm = b * num_kv_heads * splits <= num_sms
    block, budget = MMA_KEYS, IN_FLIGHT_BYTES // CTAS_PER_SM
    if one_cta_per_sm and longest >= 2 * MMA_KEYS * splits:
        block, budget = 2 * MMA_KEYS, LARGE_BLOCKS_BYTES
    return MosaicConfig(splits, block, budget // _block_bytes(args, block), CTAS_PER_SM * num_sms)


def _block_bytes(args: DecodeArgs, block: int) -> int:
    """The bytes of a block of keys and values."""
    return 2 * block * args.qkv.shape[2] * args.qkv.dtype.itemsize


def choose_config(args: DecodeArgs) -> MosaicConfig:
    """The tuned config for a call of these shapes on this device, else the heuristic one."""
    choice = tuned.lookup("append_decode/mosaic", CASES, shapes_of, call_shapes(args))
    return MosaicConfig(**choice) if choice else heuristic_config(args)
