"""The C heap, where the C library is glibc: what it keeps, and what it gives back.

Owns: ``keep_heap_small``, for a process that is ours alone (a library must not change its host's
allocator; a command may), and ``release_free_heap``.
"""

from __future__ import annotations

import ctypes
import os

M_ARENA_MAX = -8  # glibc's malloc.h


def keep_heap_small() -> None:
    """An arena for every core, two at least, where the C library knows arenas (glibc).

    Every loading thread otherwise gets an arena of its own, up to eight a core, which keeps part
    of what it freed: 65 MiB more resident with SmolLM2 on two cores. Fewer would have threads wait
    for each other: on 16 cores a start that compiles took 46 s without a limit, 59 with eight
    arenas and 100 with two. Must come before threads allocate.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, max(2, os.cpu_count() or 1))


def release_free_heap() -> None:
    """Give the heap's free memory back to the system, which takes some milliseconds.

    Whatever needed much for a moment leaves it mapped: reading Qwen3's tokenizer.json 120 MiB,
    restoring weights 70 MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
