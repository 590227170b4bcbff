"""The kernels of traced steps, made by threads and processes beside the one that traces.

Owns: ``KernelsAhead``, which knows what is under way. Must not know: executables, XLA's options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from jax.extend.core import ClosedJaxpr

from pallas_kernels.ahead import kernels_in
from pallas_kernels.lowered import LoweredKernel
from pallas_kernels.lowering_pool import LoweringPool

KERNEL_THREADS = 8  # that compile kernels in Triton
# Processes that lower kernels in Mosaic. An engine on an H200 has 46 of them, 0.1 to 1.5 s each; a
# process takes a second to start and 0.1 GB of its own, and more would be done no sooner.
MOST_PROCESSES = 12
# With two cores and two processes the kernels and steps of such an engine are lowered after 19 s,
# with one process after 25 and by this process alone after 31.
FEWEST_PROCESSES = 2
SPARE_CORES = 2  # for this process, which traces and compiles meanwhile


class KernelsAhead:
    """Each kernel is made once. Entered once; nothing goes on after the end.

    Those in Mosaic are begun when they are first met, as processes lower them. Those in Triton need
    Python's lock for a fifth of their time, and wait until ``all_traced``: threads that took turns
    at it with the one that traces had a first kernel after 11 s, and it traced for 9 s, not 4 (an
    engine on an H200 with 16 cores).
    """

    def __init__(self, cores: int) -> None:
        self._processes = max(FEWEST_PROCESSES, min(cores - SPARE_CORES, MOST_PROCESSES))
        self._threads = ThreadPoolExecutor(KERNEL_THREADS)
        # Each waits for a process and then for XLA; no process is to wait for a thread.
        self._mosaic_threads = ThreadPoolExecutor(2 * self._processes)
        self._pool: LoweringPool | None = None  # not before there is a kernel for it
        self._begun: dict[Hashable, Future[Any]] = {}
        self._deferred: list[tuple[Future[Any], Callable[[], Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._threads, self._mosaic_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def begin(self, traced: ClosedJaxpr) -> list[Future[Any]]:
        """See to what nobody has seen to yet; returns what to wait for before the step is lowered,
        which for some of it is over only after ``all_traced``.
        """
        found = kernels_in(traced)
        for key, compile_kernel in found.items():
            if key in self._begun:
                continue
            if isinstance(key, LoweredKernel):
                self._begun[key] = self._begin_mosaic(key)
            else:
                self._begun[key] = Future()
                self._deferred.append((self._begun[key], compile_kernel))
        return [self._begun[key] for key in found]

    def all_traced(self) -> None:
        """Compile what has waited until all steps were traced, in the order it was met."""
        for future, compile_kernel in self._deferred:
            self._threads.submit(_settle, future, compile_kernel)
        self._deferred.clear()

    def _begin_mosaic(self, kernel: LoweredKernel) -> Future[None]:
        if self._pool is None:
            self._pool = LoweringPool(self._processes)
        return self._mosaic_threads.submit(kernel.compile, self._pool.lower)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
