"""CPU time, which other processes on the machine do not change."""

from __future__ import annotations

import resource


def cpu_seconds() -> float:
    """Seconds of CPU time of this process and of its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, kinds))
