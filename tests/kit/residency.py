"""Which OS pages of a range of memory are resident."""

from __future__ import annotations

import ctypes
import mmap


def resident_pages(address: int, num_bytes: int) -> int:
    """The number of OS pages that overlap the range and are in memory (mincore(2))."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + num_bytes - first
    flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(first, size, flags) == 0, ctypes.get_errno()
    return sum(flag & 1 for flag in flags)
