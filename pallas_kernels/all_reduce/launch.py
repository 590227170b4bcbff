"""The CTAs of all_reduce, and which calls its Triton kernel supports.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.all_reduce.ref import AllReduceArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.exchange import MAX_CTAS, MAX_VALUES, TILE

NUM_WARPS = 4
# All CTAs of a call must run at the same time, as each waits for the other devices. With up to 128
# registers a thread an SM has four. More values are exchanged one tile after the other.
CTAS_PER_SM = 4
# In a step that only decodes, a sum by NCCL also divides the CUDA graph, and the host has to launch
# its parts. So the kernel adds as many values as all devices send 12 MiB of, if these are more.
MAX_SENT = 6 * MAX_VALUES


def most_values(devices: int, *, decodes: bool) -> int:
    """The values of the largest sum of a step that is not NCCL's."""
    return max(MAX_VALUES, MAX_SENT // (devices - 1)) if decodes else MAX_VALUES


def ctas(values: int) -> int:
    """The CTAs for so many values of each device: equally many on all, which are of one kind."""
    return min(MAX_CTAS, CTAS_PER_SM * current_device().num_sms, -(-values // TILE))


def rounds(values: int) -> int:
    """The exchanges of a CTA for so many values."""
    return -(-values // (TILE * ctas(values)))


def supports(args: AllReduceArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    if args.axis is not None and args.peers is None:
        return "the devices have no exchange memory"
    if (reason := unfit_for_triton(args.partials, args.partials)) is not None:
        return reason
    tokens, width = args.partials.shape[-2:]
    most = MAX_VALUES
    if args.peers is not None:
        most = most_values(args.peers.addresses.size // 2, decodes=args.peers.decodes)
    if not 0 < tokens * width <= most:
        return f"{tokens * width} values are not between 1 and {most}"
    return None
