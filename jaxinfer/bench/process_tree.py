"""Resident memory and CPU time of a process and of all its descendants, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

KIB = 1024


class TreeMemory(NamedTuple):
    """Bytes over the tree; ``pss`` counts a page that several processes share only once."""

    rss: int
    pss: int
    processes: int


def tree_memory(pid: int) -> TreeMemory:
    """Memory of ``pid`` and its descendants; raises ``ProcessLookupError`` if it has exited."""
    sizes = [size for each in tree_processes(pid) if (size := _rollup(each)) is not None]
    if not sizes:
        raise ProcessLookupError(f"no process {pid}")
    return TreeMemory(sum(rss for rss, _ in sizes), sum(pss for _, pss in sizes), len(sizes))


class TreeCpu(NamedTuple):
    """CPU seconds of a process itself, and of the process and its descendants."""

    own: float
    tree: float


def tree_cpu(pid: int) -> TreeCpu:
    """CPU time since the start, of living processes. Raises ``OSError`` if ``pid`` has exited."""
    own = _cpu_seconds(pid)
    return TreeCpu(own, own + sum(_cpu_seconds(each) for each in tree_processes(pid)[1:]))


def _cpu_seconds(pid: int) -> float:
    """User and system time; fields are counted from the end of the name, which may have spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree_processes(pid: int) -> list[int]:
    """``pid`` and its descendants."""
    found = [pid]
    for each in found:  # the list grows during the loop
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue  # the thread has ended
    return found


def _rollup(pid: int) -> tuple[int, int] | None:
    """Rss and Pss in bytes; None if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib["Rss"] * KIB, kib["Pss"] * KIB
