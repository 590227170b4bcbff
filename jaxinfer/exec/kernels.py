"""The kernels of traced steps, made by threads and processes beside the one that traces.

Owns: ``KernelsAhead``, which knows what is under way. Must not know: executables, XLA's options.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from jax.extend.core import ClosedJaxpr

from pallas_kernels.ahead import kernels_in
from pallas_kernels.device import current_device
from pallas_kernels.kernel_pool import KernelError, KernelPool
from pallas_kernels.lowered import LoweredKernel, name_by_hash

if TYPE_CHECKING:
    from pallas_kernels.machine_code import KernelCall

KERNEL_THREADS = 8  # that compile kernels; those in Triton need Python's lock for a fifth of it
# Processes that make kernels in Mosaic. An engine on an H200 lowers 60 of them, 0.1 to 1.5 s each,
# and compiles them and 7 calls of linked ones, 0.1 to 3 s each.
MOST_PROCESSES = 14
# With two cores and two processes the kernels and steps of such an engine are lowered after 19 s,
# with one process after 25 and by this process alone after 31.
FEWEST_PROCESSES = 2
SPARE_CORES = 2  # for this process, which traces and compiles steps meanwhile
MOSAIC_THREADS = 64  # that wait for a process: enough for all kernels of an engine


class KernelsAhead:
    """Each kernel is begun when it is first met. Entered once; nothing goes on after the end."""

    def __init__(self, cores: int) -> None:
        self._device = current_device()
        self._processes = max(FEWEST_PROCESSES, min(cores - SPARE_CORES, MOST_PROCESSES))
        self._threads = ThreadPoolExecutor(KERNEL_THREADS)
        self._mosaic_threads = ThreadPoolExecutor(MOSAIC_THREADS)
        self._pool: KernelPool | None = None  # not before there is a kernel for it
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
        """Have processes that make kernels begin to start, 1 to 3 s ahead of the first kernel."""
        self._threads.submit(self._processes_for_kernels)

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

    def link(self, traced: ClosedJaxpr, module: Any) -> list[Future[Any]]:  # an ir.Module
        """Link the kernels of a step that was begun so and is lowered now, in place, and begin to
        compile what they have become, and those that have no neighbour; returns what to wait for
        before the step is compiled.
        """
        from pallas_kernels.link import link_kernels  # not for a start from a bundle

        kernels = [kernel for kernel in kernels_in(traced) if isinstance(kernel, LoweredKernel)]
        sources = {kernel: kernel.sources() for kernel in kernels}
        by_hash = {name: source for each in sources.values() for name, source in each.items()}
        linked = link_kernels(module, by_hash.__getitem__)
        named = name_by_hash(module)
        lone = [each for each in kernels if named & sources[each].keys() and not each.compiled]
        calls = (*linked, *lone)
        return [self._once(each, self._mosaic_threads, self._compile, each) for each in calls]

    def _once(
        self, key: Hashable, threads: ThreadPoolExecutor, run: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        if key not in self._begun:
            self._begun[key] = threads.submit(run, *args)
        return self._begun[key]

    def _lower(self, kernel: LoweredKernel) -> None:
        kernel.lower(self._processes_for_kernels().run)

    def _compile(self, kernel: LoweredKernel | KernelCall) -> None:
        kernel.compile(self._processes_for_kernels().run)

    def _processes_for_kernels(self) -> KernelPool:
        with self._making_pool:
            if self._ended:
                raise KernelError("no kernel is made any more")
            if self._pool is None:
                self._pool = KernelPool(self._processes, self._device)
            return self._pool
