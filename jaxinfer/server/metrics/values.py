"""Histograms with a low cost per value, and rates over the last seconds.

Owns: ``Histogram``, ``HistogramFamily``, ``Rates``, the bucket bounds. One thread writes and reads
them. prometheus_client's own histogram locks twice per value, takes one value at a time and cannot
be read back, which ``/stats`` needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate

# vLLM's bounds, so that its dashboards and alerts find every boundary that they name
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008),  # finer than vLLM's, which start at 0.01
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BOUNDS = (1, 2, 5, 10, 20)
PREEMPTIONS_BOUNDS = (1, 2, 3, 4, 5, 10, 20)
# those of prometheus-fastapi-instrumentator, whose series vLLM's server exports
HTTP_BOUNDS = (0.1, 0.5, 1.0)
HTTP_FINE_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    *(2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
# series of our own
STEP_SECONDS_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02),
    *(0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


def token_count_bounds(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``largest``: vLLM's bounds for tokens of a request."""
    powers = (10**exponent for exponent in range(len(str(largest))))
    return tuple(
        bound for power in powers for step in (1, 2, 5) if (bound := step * power) <= largest
    )


class Histogram:
    """Counts of values by bucket; a value belongs to the first bound that is not below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is above all bounds
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add ``count`` values that are all ``value``."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def quantile(self, share: float) -> float | None:
        """The value that a ``share`` of all values does not exceed; None before the first value.

        Linear within a bucket, and the last bound for values above it, as in Prometheus's
        ``histogram_quantile``.
        """
        cumulative = list(accumulate(self.counts))
        if not cumulative[-1]:
            return None
        rank = share * cumulative[-1]
        bucket = bisect_left(cumulative, rank)
        if bucket == len(self.bounds):
            return float(self.bounds[-1])
        low = self.bounds[bucket - 1] if bucket else 0.0
        below = cumulative[bucket] - self.counts[bucket]
        within = (rank - below) / self.counts[bucket] if self.counts[bucket] else 0.0
        return low + (self.bounds[bucket] - low) * within

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


@dataclass(frozen=True)
class HistogramFamily:
    """Histograms of one series, one for each set of label values."""

    name: str
    documentation: str
    bounds: tuple[float, ...]
    label_names: tuple[str, ...] = ()
    children: dict[tuple[str, ...], Histogram] = field(default_factory=dict)

    def child(self, *label_values: str) -> Histogram:
        """The histogram of these label values; it is exported from now on."""
        return self.children.setdefault(label_values, Histogram(self.bounds))


class Rates:
    """Growth of counters over the last ``window`` seconds."""

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._marks: deque[tuple[float, tuple[float, ...]]] = deque()

    def mark(self, now: float, counters: tuple[float, ...]) -> None:
        """Store the counters, at most once a second; one mark older than the window is kept."""
        marks = self._marks
        if marks and now - marks[-1][0] < 1.0:
            return
        marks.append((now, counters))
        while len(marks) > 1 and marks[1][0] <= now - self._window:
            marks.popleft()

    def read(self, now: float, counters: tuple[float, ...]) -> tuple[float, ...]:
        """Growth a second of each counter since the newest mark that is as old as the window."""
        if not self._marks:
            return (0.0,) * len(counters)
        old_enough = [mark for mark in self._marks if mark[0] <= now - self._window]
        then, before = old_enough[-1] if old_enough else self._marks[0]
        elapsed = max(now - then, 1.0)
        return tuple((new - old) / elapsed for new, old in zip(counters, before, strict=True))
