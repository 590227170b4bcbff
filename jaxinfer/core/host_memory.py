"""Host memory of the process: Python's garbage collector, the C heap and the pages of libraries.

A library must not change the allocator of its host process, so only commands and the engine's own
process call ``limit_heap_arenas``, ``collect_seldom`` and ``release_startup_memory``.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

NEVER = 2**31 - 1  # as a threshold of gc.set_threshold: no full collection
YOUNG_OBJECTS = 5_000  # new ones that begin a collection of ``collect_seldom``; Python's is 700
M_ARENA_MAX = -8  # from glibc's malloc.h
MADV_DONTNEED = 4  # from Linux's mman.h
MAPPINGS = Path("/proc/self/smaps")  # exists on Linux only
# In the format of proc_pid_smaps(5): a private, read-only mapping of a library, all of whose pages
# equal the file (relocations make pages anonymous). The groups: addresses and resident KiB.
_FIELDS = r"(?:[A-Z]\w*:.*\n)*"
_LIBRARY = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) .-.p \S+ \S+ \d+ +.*\.so(?:\.\d+)*\n"
    rf"{_FIELDS}Rss: +(\d+) kB\n{_FIELDS}Anonymous: +0 kB$",
    re.MULTILINE,
)


@contextmanager
def gc_paused() -> Generator[None]:
    """Disable the garbage collector while many long-lived objects are created.

    It would scan them again and again: a quarter of the time of importing JAX (140,000 objects) and
    of the time of reading a tokenizer of GGUF (150,000 merges), and a seventh of the time of
    compiling 33 steps of 36 layers (half a million objects), of which it would free 80 MB.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def full_collections_deferred() -> Generator[None]:
    """Let the garbage collector scan only young objects; full collections wait for the end.

    Python starts a full collection when the old objects have grown by a quarter, for example by
    names of cached pages. With 64 prompts of 1,024 tokens at a time every fourth batch met one: the
    device, at 5 ms a step, waited 30 ms or more while JAX's 140,000 objects were scanned (two cores
    of an AMD EPYC).
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        if old != NEVER:  # else another thread has deferred them, and restores the threshold
            gc.set_threshold(young, middle, old)


def collect_seldom() -> None:
    """Exempt the objects of the start from garbage collection, and scan new ones less often.

    A full collection would scan JAX's 140,000 objects for 0.1 s. The scheduler makes and frees many
    nodes of maps at once: in the middle of the admission of a prompt whose 1,024 pages evict others
    700 new objects began a collection, 1.1 of 4.0 ms. With 18 such prompts there were 101
    collections of 27 ms in all, from 5,000 objects on 3 of 3 ms (two cores of a virtual machine).
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def limit_heap_arenas(most: int | None = None) -> None:
    """Limit glibc's heap to so many arenas, by default one for each core, at least two. Other C
    libraries: no effect.

    Without a limit every loading thread gets an arena of its own, up to eight a core, and each
    keeps part of what was freed: 65 MiB more resident memory with SmolLM2 on two cores. With fewer
    arenas threads wait for each other: on 16 cores a start that compiles took 46 s without a limit,
    59 s with eight arenas and 100 s with two. Call it before threads allocate.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, most or max(2, os.cpu_count() or 1))


def release_startup_memory() -> None:
    """Return memory that only the start needed to the system: free heap and library pages."""
    release_free_heap()
    release_library_pages()


def release_free_heap() -> None:
    """Return the free memory of glibc's heap to the system, which takes some milliseconds.

    The heap keeps freed memory mapped: 120 MiB after Qwen3's tokenizer.json is read (three times
    the size of the tokenizer), 70 MiB after weights are restored.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_zeros(address: int, num_bytes: int) -> None:
    """Return the memory of a range that holds only zeros to the system.

    A page of it comes back, zeroed again, when it is first read or written. Memory at the ends that
    shares an OS page with other data stays. Without madvise (Windows) nothing is released.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        _madvise(first, size)


def release_library_pages() -> int:
    """Return resident pages of libraries to the system if this process cannot write to them.

    Returns their size in bytes. A start touches far more of its libraries than serving does: of the
    2.0 GB of an engine on an H200 0.4 GB are such pages, and its steps read 0.03 GB of them again.
    A page holds the content of its file and comes back from the page cache when it is read, within
    some microseconds. The call takes 70 ms there. Without /proc/self/smaps (not Linux) it does
    nothing.

    Other files are left out: a library stays mapped while the process lives, but another thread may
    unmap a file and map memory of its own at the same address before the pages are released.
    """
    try:
        smaps = MAPPINGS.read_text()
    except OSError:
        return 0
    released = 0
    for start, end, resident in _LIBRARY.findall(smaps):
        address, size = int(start, 16), int(end, 16) - int(start, 16)
        if _madvise(address, size):  # fails if locked in memory
            released += int(resident) << 10
    return released


def _madvise(address: int, size: int) -> bool:
    """Call madvise with MADV_DONTNEED; False if it fails."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(address, size, MADV_DONTNEED) == 0  # type: ignore[no-any-return]
