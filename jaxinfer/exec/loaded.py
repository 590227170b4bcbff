"""The executables of an engine by name, where some are loaded later than others.

Owns: ``LoadedExecutables``. Must not know: bundles, how an executable is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from jaxinfer.core.heap import release_free_heap


class LoadedExecutables(Mapping[str, jax.stages.Compiled]):
    """Some are there, others come in groups: who first asks for one has its whole group loaded by
    so many threads, and waits for that one alone.
    """

    def __init__(
        self,
        loaded: Mapping[str, jax.stages.Compiled],
        groups: Sequence[Collection[str]],
        load: Callable[[str], jax.stages.Compiled],
        threads: int,
    ) -> None:
        self._loaded, self._load, self._threads = loaded, load, threads
        self._group_of = {name: tuple(group) for group in groups for name in group}
        self._under_way: dict[str, Future[jax.stages.Compiled]] = {}
        self._beginning = threading.Lock()

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        if name in self._loaded:  # asked at every step
            return self._loaded[name]
        return self._begun(name).result()

    def load_group(self, name: str) -> None:
        """Have the group of this one loaded, and wait for all of it."""
        for other in self._group_of[name]:
            self._begun(other).result()

    def _begun(self, name: str) -> Future[jax.stages.Compiled]:
        """Its loading, begun with that of its group if nobody has; it comes first."""
        with self._beginning:
            if name not in self._under_way:
                pool = ThreadPoolExecutor(self._threads)
                left = set(self._group_of[name])
                for other in sorted(self._group_of[name], key=lambda other: other != name):
                    self._under_way[other] = pool.submit(self._load_of, left, other)
                pool.shutdown(wait=False)
        return self._under_way[name]

    def _load_of(self, left: set[str], name: str) -> jax.stages.Compiled:
        """One of a group, of which these are not loaded yet. The last gives back what all took."""
        try:
            return self._load(name)
        finally:
            left.discard(name)
            if not left:
                release_free_heap()

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._group_of

    def __iter__(self) -> Iterator[str]:
        return iter((*self._loaded, *self._group_of))

    def __len__(self) -> int:
        return len(self._loaded) + len(self._group_of)
