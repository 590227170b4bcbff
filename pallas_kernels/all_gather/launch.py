"""Which calls the Triton kernel of all_gather supports.

It uses the counters, flags and data of ``all_reduce``, a tile of which a CTA exchanges at a time,
so arrays of any size need no more memory. Does not import Triton, so it works where Triton is not
installed.
"""

from __future__ import annotations

from pallas_kernels.all_gather.ref import AllGatherArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.exchange import MAX_VALUES

MAX_INDEX = (1 << 31) - MAX_VALUES  # indices of values are int32


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
