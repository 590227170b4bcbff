"""The exchange memory of all_reduce, and which calls its Triton kernel supports.

Each of N devices has exchange memory of ``words(N)`` 32-bit words, zero at first, to which all of
them write:

    counters  int32[CTAS]                  calls of each CTA of this device
    flags     int32[N, CTAS]               the number of the last call whose data a CTA has written
    lost      int32[CTAS]                  [0]: 1 after a wait for a device that did not answer
    data      float32[2, N, MAX_VALUES]    of calls with even and odd numbers
    rows      float32[2, N, MAX_VALUES]    the same of ``all_reduce_norm``, whose CTAs follow

A call of one of the two ops may follow any call of the other one, as they share no CTA.

Does not import Triton, so it works where Triton is not installed.
"""

from __future__ import annotations

from pallas_kernels.all_reduce.ref import AllReduceArgs
from pallas_kernels.lib.checks import unfit_for_triton

TILE = 1024  # values of a CTA; the same in all calls, so that a CTA's data is always its own
NUM_WARPS = 4
# All CTAs of a call must run at the same time, as each waits for the other devices: an SM has room
# for 16 of 128 threads.
MAX_CTAS = 512
MAX_VALUES = MAX_CTAS * TILE  # 2 MiB, which NVLink moves in 5 us; NCCL is as fast from there on

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


def supports(args: AllReduceArgs) -> str | None:
    """Why the Triton kernel cannot run the call, or None."""
    if args.axis is not None and args.peers is None:
        return "the devices have no exchange memory"
    if (reason := unfit_for_triton(args.partials, args.partials)) is not None:
        return reason
    tokens, width = args.partials.shape[-2:]
    if not 0 < tokens * width <= MAX_VALUES:
        return f"{tokens * width} values are not between 1 and {MAX_VALUES}"
    return None
