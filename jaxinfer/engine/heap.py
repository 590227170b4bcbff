"""The C heap of a process that is ours alone.

Owns: ``keep_heap_small``. A library must not change its host's allocator; a command may.
Must not know: commands.
"""

from __future__ import annotations

import ctypes

M_ARENA_MAX = -8  # glibc's malloc.h


def keep_heap_small() -> None:
    """Two arenas for all threads, where the C library knows arenas (glibc).

    Every loading thread otherwise gets an arena of its own, which keeps part of what it freed:
    65 MiB more resident with SmolLM2. Must come before threads allocate.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 2)
