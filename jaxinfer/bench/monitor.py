"""Beside a measurement: the GPUs' use, power and memory, the server's memory, and a progress bar.

GPUs are asked through NVML (package ``nvidia-ml-py``, extra ``bench``), of which only a server on
this machine has anything to tell: one that was started here, or whose process id is known.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from jaxinfer.bench.numbers import mean
from jaxinfer.bench.process_tree import tree_memory

SECONDS_BETWEEN = 0.25  # NVML itself averages over 1/6 to 1 s
MEMORY_EVERY = 8  # samples: the kernel takes some ms to add up the pages of a process tree


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One look at the machine. A list has an entry for each GPU; none if NVML does not tell."""

    ns: int  # since the start of the series
    gpu_percent: list[int] = []  # share of the time in which a kernel ran
    gpu_watts: list[float] = []
    gpu_mb: list[float] = []  # memory in use, by all processes
    server_rss_mb: float = 0.0  # over the process tree; 0: not looked at this time


class Gpus:
    """The GPUs that NVML lists; none, with the reason, where it cannot be used."""

    def __init__(self) -> None:
        self.reason, self._handles = "", list[Any]()
        try:
            import pynvml  # pyright: ignore[reportMissingImports]
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]
        except pynvml.NVMLError as error:
            self.reason = f"NVML does not answer ({error})"
        if not self.reason and not self._handles:
            self.reason = "NVML lists no GPU"
        if self._handles:
            names = zip(("use", "power", "memory"), self.look(), strict=True)
            if absent := [name for name, column in names if not column]:
                self.reason = f"NVML does not tell {' and '.join(absent)} of these GPUs"

    def look(self) -> tuple[list[int], list[float], list[float]]:
        """Percent, watts and MB of each GPU; a list is empty if a GPU does not tell it, as one that
        is divided (MIG) has no use.
        """
        if not self._handles:
            return [], [], []
        nvml = self._nvml
        return (
            self._each(lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            self._each(lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            self._each(lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e6),
        )

    def _each(self, read: Callable[[Any], Any]) -> list[Any]:
        try:
            return [read(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return []


@contextmanager
def watched(pid: int | None) -> Generator[list[Sample]]:
    """Look at the machine until the block ends; none without a pid."""
    samples: list[Sample] = []
    if pid is None:
        yield samples
        return
    ended, gpus, start = threading.Event(), Gpus(), time.perf_counter_ns()

    def look() -> None:
        number = 0
        while not ended.is_set():
            rss = 0.0
            if number % MEMORY_EVERY == 0:
                with suppress(ProcessLookupError):
                    rss = tree_memory(pid).rss / 1e6
            samples.append(Sample(time.perf_counter_ns() - start, *gpus.look(), rss))
            number += 1
            ended.wait(SECONDS_BETWEEN)

    thread = threading.Thread(target=look, name="jaxinfer-bench-monitor", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def missing_telemetry(pid: int | None) -> dict[str, str]:
    """For a report: why it has no use, power and memory of GPUs; empty if it has them."""
    reason = Gpus().reason
    if pid is None:
        reason = "the server's process is not known; give --server-pid if it is on this machine"
    return {"gpu_telemetry": f"missing: {reason}"} if reason else {}


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of use and power of each GPU that was used, as far as it is known, peaks of memory."""
    facts: dict[str, float] = {}
    if peak := max((one.server_rss_mb for one in samples), default=0.0):
        facts["server_rss_peak_mb"] = peak
    for gpu in range(max((len(one.gpu_mb) for one in samples), default=0)):
        percent = [one.gpu_percent[gpu] for one in samples if one.gpu_percent]
        watts = [one.gpu_watts[gpu] for one in samples if one.gpu_watts]
        if percent and not any(percent):
            continue
        if percent:
            facts[f"gpu{gpu}_percent"] = mean(percent)
        if watts:
            facts[f"gpu{gpu}_watts"] = mean(watts)
        facts[f"gpu{gpu}_peak_mb"] = max(one.gpu_mb[gpu] for one in samples if one.gpu_mb)
    return facts


@contextmanager
def answers_bar(count: int, shown: bool) -> Generator[Callable[[], None]]:
    """A bar of the answers on a terminal's stderr; the function that is called for each."""
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=2
    ) as bar:
        task = bar.add_task("", total=count)
        yield lambda: bar.advance(task)
