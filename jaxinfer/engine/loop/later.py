"""Executables that join an engine while it serves: the buckets they complete, their first runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxinfer.core.step import Bucket, BucketsLoaded

if TYPE_CHECKING:
    from jaxinfer.exec.compile.build import Later, LaterExecutables
    from jaxinfer.exec.run.executor import Executor


@dataclass
class LaterBuckets:
    """Adds what ``later`` delivers to an executor, and runs new buckets once."""

    later: Later
    executor: Executor
    is_complete: bool = False  # no executables follow
    _new: list[Bucket] = field(default_factory=list[Bucket])  # not run yet

    def add(self, loaded: LaterExecutables) -> tuple[BucketsLoaded, ...]:
        """Add executables, on the engine's thread; returns the event of the buckets that are now
        complete, if any are.
        """
        self.is_complete = loaded.are_last
        self._new += (buckets := self.executor.add(loaded.by_name))
        return (BucketsLoaded(buckets),) if buckets else ()

    @property
    def warms_up(self) -> bool:
        """True if ``warm_up_next`` has a bucket to run."""
        return bool(self._new)

    def warm_up_next(self) -> None:
        """Run a new bucket for the first time, which takes a GPU some 25 ms; when idle.

        Otherwise the first request that needs the bucket waits for that, and no other does.
        """
        self.executor.run_once([self._new.pop(0)])
