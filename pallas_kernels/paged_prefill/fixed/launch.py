"""Which calls attention with fixed bits supports on a GPU, and its tiles, also of decode rows.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.append_decode.ref import DecodeArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.numerics import power_of_two
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.paged_prefill.launch import HEAD_DIMS, TritonConfig
from pallas_kernels.paged_prefill.ref import PrefillArgs

# Keys of a split, counted from the first key of the sequence. Longer contexts have longer ones, as
# a decode row keeps in memory what it has of each: 0.3 MB with 32 heads of 128 components, less
# than its logits, which are planned for and come later.
MIN_SPLIT, MAX_SPLITS = 512, 16
WIDE_HEAD = 128  # two accumulators of more components and 64 rows would spill registers


def tiles_for(dtype_bytes: int, head_dim: int) -> TritonConfig:
    """The tiles of decode rows and of prompts: nothing else of a call may choose them.

    Blocks are counted from the first key of the sequence.
    """
    is_wide = head_dim > WIDE_HEAD
    if dtype_bytes > 2:  # without tensor cores larger tiles, or more stages, would spill registers
        return TritonConfig(16, 16, 4, 1 if is_wide else 2)
    # so would blocks of 64 keys
    return TritonConfig(16, 32, 4, 3) if is_wide else TritonConfig(64, 32, 4, 4)


def split_for(table_width: int, page_size: int) -> int:
    """The keys of a split, a power of two; all buckets of an engine have one width of the table."""
    return max(MIN_SPLIT, power_of_two(-(-table_width * page_size // MAX_SPLITS)))


def supports(args: PrefillArgs | DecodeArgs) -> str | None:
    """Why the kernel cannot run the call, or None."""
    q = args.queries if isinstance(args, DecodeArgs) else args.q
    (_, n, h), num_kv_heads = q.shape, args.k_pages.shape[2]
    if isinstance(args, DecodeArgs) and not args.appends:
        return "the keys are another layer's"
    if args.slopes is not None or args.sink_values is not None:
        return "scores have a bias (ALiBi), or sinks have values"
    if args.k_pages.dtype == BITS:
        return "the pages are 8-bit floats"
    if not HEAD_DIMS[0] <= h <= HEAD_DIMS[1]:
        return f"head_dim {h} is not between {HEAD_DIMS[0]} and {HEAD_DIMS[1]}"
    if n // num_kv_heads > (most := tiles_for(q.dtype.itemsize, h).rows):
        return f"{n // num_kv_heads} query heads share a kv head, at most {most} may"
    if args.scale <= 0.0:
        return f"scale {args.scale} is not positive"
    values = args.qkv if isinstance(args, DecodeArgs) else args.q
    return unfit_for_triton(values, args.k_pages)
