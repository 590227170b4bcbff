"""The kernels of traced steps, made by threads and processes beside the one that traces.

Owns: ``KernelsAhead``, which knows what is under way. Must not know: executables, XLA's options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Self

from jax.extend.core import ClosedJaxpr

from pallas_kernels.ahead import kernels_in
from pallas_kernels.lowered import LoweredKernel, name_by_hash
from pallas_kernels.lowering_pool import LoweringError, LoweringPool

KERNEL_THREADS = 8  # that compile kernels; those in Triton need Python's lock for a fifth of it
# Processes that lower kernels in Mosaic. An engine on an H200 has 46 of them, 0.1 to 1.5 s each; a
# process takes 0.1 GB of its own, and more would be done no sooner.
MOST_PROCESSES = 12
# With two cores and two processes the kernels and steps of such an engine are lowered after 19 s,
# with one process after 25 and by this process alone after 31.
FEWEST_PROCESSES = 2
SPARE_CORES = 2  # for this process, which traces and compiles meanwhile
# That wait for a process and then for XLA: enough for all kernels of an engine. With 24 all waited
# for XLA, and processes for them: the last kernel of 46 was begun after 14 s of a start, not 8.
MOSAIC_THREADS = 64


class KernelsAhead:
    """Each kernel is begun when it is first met. Entered once; nothing goes on after the end."""

    def __init__(self, cores: int) -> None:
        self._processes = max(FEWEST_PROCESSES, min(cores - SPARE_CORES, MOST_PROCESSES))
        self._threads = ThreadPoolExecutor(KERNEL_THREADS)
        self._mosaic_threads = ThreadPoolExecutor(MOSAIC_THREADS)
        self._pool: LoweringPool | None = None  # not before there is a kernel for it
        self._making_pool = Lock()
        self._ended = False
        self._begun: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._threads, self._mosaic_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        with self._making_pool:
            self._ended = True
            if self._pool is not None:
                self._pool.close()

    def expect_mosaic(self) -> None:
        """Have processes that lower kernels begin to start, 1 to 3 s ahead of the first kernel."""
        self._threads.submit(self._processes_to_lower)

    def begin(self, traced: ClosedJaxpr, *, to_link: bool = False) -> list[Future[Any]]:
        """Compile what nobody compiles yet; returns what to wait for before the step is lowered.

        What an earlier one of these has compiled is there. Kernels in Mosaic of a step ``to_link``
        are only lowered: ``link`` compiles what becomes of them.
        """
        wanted = []
        for key, compile_kernel in kernels_in(traced).items():
            if not isinstance(key, LoweredKernel):
                wanted.append(self._once(key, self._threads, compile_kernel))
            elif to_link:
                lowering = ("lowered", key)
                wanted.append(self._once(lowering, self._mosaic_threads, self._lower, key))
            elif not key.compiled:
                wanted.append(self._once(key, self._mosaic_threads, self._compile, key))
        return wanted

    def link(self, traced: ClosedJaxpr, module: Any) -> None:  # an ir.Module
        """Link the kernels of a step that was begun so and is lowered now, in place, and begin to
        compile what they have become, and those that have no neighbour.
        """
        from pallas_kernels.link import link_kernels  # not for a start from a bundle

        kernels = [kernel for kernel in kernels_in(traced) if isinstance(kernel, LoweredKernel)]
        sources = {kernel: kernel.sources() for kernel in kernels}
        by_hash = {name: source for each in sources.values() for name, source in each.items()}
        for call in link_kernels(module, by_hash.__getitem__):
            self._once(call, self._mosaic_threads, call.compile)
        named = name_by_hash(module)
        for kernel in kernels:
            if named & sources[kernel].keys() and not kernel.compiled:
                self._once(kernel, self._mosaic_threads, self._compile, kernel)

    def wait(self) -> None:
        """Until all that was begun has ended; raises what one of them raised."""
        for kernel in self._begun.values():
            kernel.result()

    @property
    def done(self) -> bool:
        """Whether all that was begun has ended."""
        return all(kernel.done() for kernel in self._begun.values())

    def _once(
        self, key: Hashable, threads: ThreadPoolExecutor, run: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        if key not in self._begun:
            self._begun[key] = threads.submit(run, *args)
        return self._begun[key]

    def _lower(self, kernel: LoweredKernel) -> None:
        kernel.lower(self._processes_to_lower().lower)

    def _compile(self, kernel: LoweredKernel) -> None:
        kernel.compile(self._processes_to_lower().lower)

    def _processes_to_lower(self) -> LoweringPool:
        with self._making_pool:
            if self._ended:
                raise LoweringError("no kernel is lowered any more")
            if self._pool is None:
                self._pool = LoweringPool(self._processes)
            return self._pool
