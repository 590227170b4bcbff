"""The kernels of traced steps, made by threads and processes beside the one that traces.

Owns: ``KernelsAhead``, which knows what is under way. Must not know: executables, XLA's options.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from jax.extend.core import ClosedJaxpr

from pallas_kernels.ahead import kernels_in
from pallas_kernels.lowered import LoweredKernel
from pallas_kernels.lowering_pool import LoweringPool

KERNEL_THREADS = 8  # that compile kernels; those in Triton need Python's lock for a fifth of it
# Processes that lower kernels in Mosaic. An engine on an H200 has 46 of them, 0.1 to 1.5 s each; a
# process takes a second to start and 0.1 GB of its own, and more would be done no sooner.
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
        self._begun: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._threads, self._mosaic_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def begin(self, traced: ClosedJaxpr) -> list[Future[Any]]:
        """Compile what nobody compiles yet; returns what to wait for before the step is lowered.

        What an earlier one of these has compiled is there.
        """
        found = {
            key: compile_kernel
            for key, compile_kernel in kernels_in(traced).items()
            if not (isinstance(key, LoweredKernel) and key.compiled)
        }
        for key, compile_kernel in found.items():
            if key in self._begun:
                continue
            if isinstance(key, LoweredKernel):
                self._begun[key] = self._begin_mosaic(key)
            else:
                self._begun[key] = self._threads.submit(compile_kernel)
        return [self._begun[key] for key in found]

    @property
    def done(self) -> bool:
        """Whether all that was begun has ended."""
        return all(kernel.done() for kernel in self._begun.values())

    def _begin_mosaic(self, kernel: LoweredKernel) -> Future[None]:
        if self._pool is None:
            self._pool = LoweringPool(self._processes)
        return self._mosaic_threads.submit(kernel.compile, self._pool.lower)
