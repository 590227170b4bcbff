"""Pages of its libraries that a process holds and may give back.

Owns: ``release_library_pages``.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAPPINGS = Path("/proc/self/smaps")  # Linux's
MADV_DONTNEED = 4  # of its mman.h
_LIBRARY = re.compile(r"\.so(\.\d+)*$")  # a path's end
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+ *(.*)")  # addresses, access, path


@dataclass
class _Mapping:
    """A piece of the address space; sizes are in KiB."""

    start: int
    end: int
    access: str  # "r-xp": p is private
    path: str
    resident: int = 0
    own: int = 0  # no longer the file's: written to, by relocations say

    @property
    def is_library_alone(self) -> bool:
        """Whether every page is a library's, and nobody may change one."""
        private_reading = self.access[1] == "-" and self.access[3] == "p"
        return private_reading and not self.own and _LIBRARY.search(self.path) is not None


def release_library_pages() -> int:
    """Give back the resident pages of libraries that this process cannot write to; in bytes.

    A start touches far more of its libraries than what runs then: of an engine's 2.0 GB on an H200
    0.4 are such pages, of which its steps ask for 0.03 again. They are the file's own content and
    come back from the system's cache when they are touched, some microseconds each. It takes 70 ms
    there. Does nothing where the system does not tell what is mapped: elsewhere than on Linux.

    Libraries alone: those stay where they are while the process lives. Where another file was
    mapped, another thread may have memory of its own by the time it is given back.
    """
    try:
        smaps = MAPPINGS.read_text()
    except OSError:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    released = 0
    for mapping in _mappings(smaps):
        if mapping.is_library_alone and mapping.resident:
            size = mapping.end - mapping.start
            if madvise(mapping.start, size, MADV_DONTNEED) == 0:  # else it is locked in memory
                released += mapping.resident << 10
    return released


def _mappings(smaps: str) -> Iterator[_Mapping]:
    """What proc_pid_smaps(5) lists: for each mapping a head, then fields."""
    mapping = None
    for line in smaps.splitlines():
        if head := _HEAD.match(line):
            if mapping is not None:
                yield mapping
            start, end, access, path = head.groups()
            mapping = _Mapping(int(start, 16), int(end, 16), access, path)
        elif mapping is not None and line.startswith("Rss:"):
            mapping.resident = int(line.split()[1])
        elif mapping is not None and line.startswith("Anonymous:"):
            mapping.own = int(line.split()[1])
    if mapping is not None:
        yield mapping
