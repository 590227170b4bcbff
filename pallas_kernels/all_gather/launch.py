"""Which calls the Triton kernel of all_gather supports, and its CTAs.

It uses the counters, flags and data of ``all_reduce``, a tile of which a CTA exchanges at a time,
so arrays of any size need no more memory. Does not import Triton, so it works where Triton is not
installed.
"""

from __future__ import annotations

from pallas_kernels.all_gather.ref import AllGatherArgs
from pallas_kernels.all_reduce.launch import MAX_CTAS, TILE
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device

# All CTAs of a call must run at the same time, as each waits for the other devices. With up to 128
# registers a thread an SM has four.
CTAS_PER_SM = 4
MAX_INDEX = (1 << 31) - MAX_CTAS * TILE  # indices of values are int32


def ctas(values: int) -> int:
    """The CTAs for so many values of each device: equally many on all, which are of one kind."""
    return min(MAX_CTAS, CTAS_PER_SM * current_device().num_sms, -(-values // TILE))


def supports(args: AllGatherArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    if args.axis is not None and args.peers is None:
        return "the devices have no exchange memory"
    if (reason := unfit_for_triton(args.x, args.x)) is not None:
        return reason
    devices = 1 if args.peers is None else args.peers.addresses.size // 2
    if not 0 < args.x.size * devices <= MAX_INDEX:
        return f"{args.x.size * devices} values are not between 1 and {MAX_INDEX}"
    return None
