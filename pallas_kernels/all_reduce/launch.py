"""The exchange memory of all_reduce, its CTAs, and which calls its Triton kernel supports.

Each of N devices has exchange memory of ``words(N)`` 32-bit words, zero at first, to which all of
them write:

    counters  int32[CTAS]                  exchanges of each CTA of this device
    flags     int32[N, CTAS]               the number of the last one whose data a CTA has written
    lost      int32[CTAS]                  [0]: 1 after a wait for a device that did not answer
    data      float32[2, N, MAX_VALUES]    of exchanges with even and odd numbers
    rows      float32[2, N, MAX_VALUES]    the same of ``all_reduce_norm``, whose CTAs follow

``all_gather`` uses the first CTAs, too. A call of one of the three ops may follow any call of
another one: either they share no CTA, or the number of its exchanges goes on.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.all_reduce.ref import AllReduceArgs
from pallas_kernels.lib.checks import unfit_for_triton
from pallas_kernels.lib.device import current_device

TILE = 1024  # values of an exchange; the same in all calls, so that a CTA's data is always its own
NUM_WARPS = 4
# All CTAs of a call must run at the same time, as each waits for the other devices. With up to 128
# registers a thread an SM has four. More values are exchanged one tile after the other.
MAX_CTAS, CTAS_PER_SM = 512, 4
MAX_VALUES = MAX_CTAS * TILE  # 2 MiB, which NVLink moves in 5 us; NCCL is as fast from there on
# In a step that only decodes, a sum by NCCL also divides the CUDA graph, and the host has to launch
# its parts. So the kernel adds as many values as all devices send 12 MiB of, if these are more.
MAX_SENT = 6 * MAX_VALUES

# Those of ``all_reduce_norm``, one for each row; a row's data has this much memory in all calls.
MAX_ROW_VALUES = 8192
MAX_ROWS = MAX_VALUES // MAX_ROW_VALUES
CTAS = MAX_CTAS + MAX_ROWS


def lost_word(devices: int) -> int:
    """Where the word ``lost`` is."""
    return CTAS * (1 + devices)


def data_word(devices: int) -> int:
    """Where the data begins."""
    return CTAS * (2 + devices)


def row_word(devices: int) -> int:
    """Where the data of ``all_reduce_norm`` begins."""
    return data_word(devices) + 2 * devices * MAX_VALUES


def words(devices: int) -> int:
    """The 32-bit words of a device's exchange memory."""
    return row_word(devices) + 2 * devices * MAX_VALUES


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
