"""The executables of an engine by name, where some are loaded when they are asked for.

Owns: ``LoadedExecutables``. Must not know: bundles, how an executable is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax


class LoadedExecutables(Mapping[str, jax.stages.Compiled]):
    """Some are there; who first asks for another has all others loaded by so many threads, and
    waits for that one alone. Not thread-safe: one thread asks.
    """

    def __init__(
        self,
        loaded: Mapping[str, jax.stages.Compiled],
        others: Collection[str],
        load: Callable[[str], jax.stages.Compiled],
        threads: int,
    ) -> None:
        self._loaded, self._others, self._load = loaded, others, load
        self._threads = threads
        self._under_way: dict[str, Future[jax.stages.Compiled]] = {}

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        if name in self._loaded:  # asked at every step
            return self._loaded[name]
        if name not in self._others:
            raise KeyError(name)
        if not self._under_way:
            pool = ThreadPoolExecutor(self._threads)
            first = sorted(self._others, key=lambda other: other != name)
            self._under_way = {other: pool.submit(self._load, other) for other in first}
            pool.shutdown(wait=False)
        return self._under_way[name].result()

    def __contains__(self, name: object) -> bool:
        return name in self._loaded or name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter((*self._loaded, *self._others))

    def __len__(self) -> int:
        return len(self._loaded) + len(self._others)
