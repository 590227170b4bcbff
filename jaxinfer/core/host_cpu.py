"""The processor cores that this process may use."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = CGROUPS) -> int:
    """The number of cores for threads that compute: those of the process' affinity, and no more
    than a container's quota of CPU time. Beyond it the system stops every thread, whatever its
    priority.
    """
    # elsewhere than on Linux no process is bound to cores
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota(cgroups)
    return max(1, bound or 1 if quota is None else min(bound or 1, ceil(quota)))


def _quota(cgroups: Path) -> float | None:
    """Cores' worth of CPU time that the container may use, by version 2 or 1 of control groups;
    None: no limit is known.
    """
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (cgroups / "cpu" / f"cpu.cfs_{name}_us").read_text().strip()
                for name in ("quota", "period")
            )
        except OSError:
            return None
    if not (quota.isdecimal() and period.isdecimal() and int(period)):  # "max", or -1
        return None
    return int(quota) / int(period)
