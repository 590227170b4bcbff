"""All counters behind ``/metrics`` and ``/stats``, and their rates over the last seconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from jaxinfer.core.limits import Limits
from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.news import EngineStats, StepKind, added


class Rejection(StrEnum):
    """The limit for which a request was refused with 429: one of the queue, or too many forms that
    wait for their compilation.
    """

    REQUESTS = "max_num_queued_reqs"
    TOKENS = "max_num_queued_tokens"
    FORMS = "structured_outputs"


def _zeros(names: Iterable[str]) -> dict[str, int]:
    return field(default_factory=lambda: dict.fromkeys(map(str, names), 0))


@dataclass(slots=True)
class KeyUsage:
    """The ended requests of one API key."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class EngineTally:
    """Counters of one engine, or the sums of several. ``stats``: after its last iteration."""

    stats: EngineStats
    limits: Limits
    num_decode_steps: int = 0
    scheduled_tokens: dict[str, int] = _zeros(StepKind)
    bucket_tokens: dict[str, int] = _zeros(StepKind)

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that is padding."""
        computed = sum(self.bucket_tokens.values())
        return 1.0 - sum(self.scheduled_tokens.values()) / computed if computed else 0.0

    @property
    def pages(self) -> dict[str, int]:
        """KV pages by their state."""
        stats = self.stats
        counts = (stats.num_live_pages, stats.num_cached_pages, stats.num_fresh_pages)
        return dict(zip(("live", "cached", "fresh"), counts, strict=True))

    @property
    def live_pages_of_windows(self) -> dict[str, int]:
        """Pages that sequences own, by the window of the layers that fill them; groups of one
        window are added up.
        """
        groups = self.limits.groups
        windows = ["none" if group.window is None else str(group.window) for group in groups]
        pages = dict.fromkeys(windows, 0)
        # an engine that has not reported yet has no counts
        for window, count in zip(windows, self.stats.num_live_pages_of_groups, strict=False):
            pages[window] += count
        return pages

    @property
    def kv_usage(self) -> float:
        """Share of the pages that sequences own."""
        num_pages = sum(self.pages.values())
        return self.stats.num_live_pages / num_pages if num_pages else 0.0

    @property
    def executables(self) -> dict[str, int]:
        """Executables: loaded ones by their source, and those that are still awaited."""
        stats = self.stats
        in_bundle = stats.num_executables - stats.num_compiled
        return {"compiled": stats.num_compiled, "bundle": in_bundle, "awaited": stats.num_awaited}

    @property
    def startup_seconds(self) -> dict[str, float]:
        """Time of the phases of the start."""
        return {"load": self.stats.load_seconds, "compile": self.stats.compile_seconds}


@dataclass(slots=True)
class Tally:
    """Counters of engines, requests and responses."""

    engines: list[EngineTally]  # by rank
    num_received: int = 0
    num_closed: int = 0  # of the received requests, those that ended in any way
    finished: dict[str, int] = _zeros(FinishReason)  # sequences
    rejected: dict[str, int] = _zeros(Rejection)
    keys: dict[str, KeyUsage] = field(default_factory=dict[str, KeyUsage])  # by name
    responses: Counter[tuple[str, str, str]] = field(  # handler, method, status class
        default_factory=Counter[tuple[str, str, str]]
    )

    @property
    def all_engines(self) -> EngineTally:
        """The sums of the engines' counters."""
        engines = self.engines
        if len(engines) == 1:
            return engines[0]
        total = EngineTally(added([one.stats for one in engines]), engines[0].limits)
        total.num_decode_steps = sum(one.num_decode_steps for one in engines)
        for kind in StepKind:
            total.scheduled_tokens[kind] = sum(one.scheduled_tokens[kind] for one in engines)
            total.bucket_tokens[kind] = sum(one.bucket_tokens[kind] for one in engines)
        return total


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
