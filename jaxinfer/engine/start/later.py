"""The executables of a server's first start that are compiled while requests are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.build import Later
from jaxinfer.exec.run.executor import Executor


@dataclass(frozen=True)
class LaterExecutables:
    """Implements ``engine.loop.interfaces.LaterBuckets``."""

    building: Later
    executor: Executor
    first: Sequence[Bucket]

    @property
    def unfinished(self) -> bool:
        """See ``LaterBuckets``."""
        return self.building.unfinished

    @property
    def has_news(self) -> bool:
        """See ``LaterBuckets``."""
        return self.building.has_news

    def take(self) -> tuple[int, tuple[Bucket, ...]]:
        """See ``LaterBuckets``."""
        taken = self.building.take()
        return len(taken), self.executor.add(taken)

    def close(self) -> None:
        """See ``LaterBuckets``."""
        self.building.close()
