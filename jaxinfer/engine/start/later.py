"""The executables of a server that are compiled or loaded while requests are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.interfaces import Joined
from jaxinfer.exec.compile.build import Later
from jaxinfer.exec.run.executor import Executor


@dataclass
class LaterExecutables:
    """Implements ``engine.loop.interfaces.LaterBuckets``."""

    building: Later
    executor: Executor
    first: Sequence[Bucket]
    _new: list[Bucket] = field(default_factory=list[Bucket])  # not run yet

    @property
    def unfinished(self) -> bool:
        """See ``LaterBuckets``."""
        return self.building.unfinished or bool(self._new)

    @property
    def has_news(self) -> bool:
        """See ``LaterBuckets``."""
        return self.building.has_news

    def take(self) -> Joined:
        """See ``LaterBuckets``."""
        taken = self.building.take()
        self._new += (buckets := self.executor.add(taken))
        return Joined(buckets, len(taken), len({*taken} & {*self.building.compiled}))

    @property
    def warms_up(self) -> bool:
        """See ``LaterBuckets``."""
        return bool(self._new)

    def warm_up_next(self) -> None:
        """See ``LaterBuckets``."""
        self.executor.run_once([self._new.pop(0)])

    def close(self) -> None:
        """See ``LaterBuckets``."""
        self.building.close()
