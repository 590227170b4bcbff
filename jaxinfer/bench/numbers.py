"""The statistics of all benchmarks, each in one place.

They are plain Python with exactly rounded sums, so that `verify` computes the same digits on every
machine, whatever its numpy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from statistics import median

RESAMPLES = 2000  # of a bootstrap interval
COVERAGE = 0.95  # of a bootstrap interval


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; 0 of no values."""
    return math.fsum(values) / len(values) if values else 0.0


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of the values themselves (numpy's default); 0 of no values."""
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values]))


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which ``percent`` of them lie, linear between neighbours; 0 of no values.

    It is numpy's default method.
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def paired_ratio(ours: Iterable[float], peer: Iterable[float]) -> float:
    """Median over rounds of the ratio within a round, in which common disturbances cancel out."""
    return median(a / b for a, b in zip(ours, peer, strict=True))


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the extremes, as a share of the median."""
    return (max(samples) - min(samples)) / 2 / median(samples)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the median by a percentile bootstrap with a fixed seed.

    It is None below three values, which resampling says nothing about.
    """
    if len(values) < 3:
        return None
    draws = random.Random(0)
    medians = [median(draws.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    tail = 50 * (1 - COVERAGE)
    return percentile(medians, tail), percentile(medians, 100 - tail)


def rotated(names: Sequence[str], repeat: int) -> list[str]:
    """The names, starting with another one in each repeat."""
    start = repeat % len(names)
    return [*names[start:], *names[:start]]
