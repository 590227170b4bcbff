"""The exchange memory of ``all_reduce``, ``all_gather`` and ``all_reduce_norm``.

Each of N devices has exchange memory of ``words(N)`` 32-bit words, zero at first, to which all of
them write:

    counters  int32[CTAS]                  exchanges of each CTA of this device
    flags     int32[N, CTAS]               the number of the last one whose data a CTA has written
    lost      int32[CTAS]                  [0]: 1 after a wait for a device that did not answer
    data      float32[2, N, MAX_VALUES]    of exchanges with even and odd numbers
    rows      float32[2, N, MAX_VALUES]    the same of ``all_reduce_norm``, whose CTAs follow

``all_gather`` uses the first CTAs, too. A call of one of the three ops may follow any call of
another one: either they share no CTA, or the number of its exchanges goes on.
"""

from __future__ import annotations

TILE = 1024  # values of an exchange; the same in all calls, so that a CTA's data is always its own
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
