"""The kernels of traced steps, made by threads and processes beside the one that traces.

Owns: ``KernelsAhead``, which knows what is under way. Must not know: executables, XLA's options.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from jax.extend.core import ClosedJaxpr
from jax.interpreters.mlir import ir

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

    def begin(self, traced: ClosedJaxpr, *, to_link: bool = False) -> list[Future[Any]]:
        """Compile what nobody compiles yet; returns what to wait for before the step is lowered.

        What an earlier one of these has compiled is there. Kernels in Mosaic of a step ``to_link``
        are only lowered: ``link`` compiles them.
        """
        if to_link:
            return self._begin_to_link(traced)
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

    def link(self, traced: ClosedJaxpr, module: ir.Module) -> None:
        """Link the kernels of a step that was begun so and is lowered now, in place, and compile
        what they have become.
        """
        from pallas_kernels.link import link_kernels  # what a start from a bundle does without

        sources = {
            hash_: source
            for kernel in _mosaic(traced)
            for hash_, source in kernel.sources().items()
        }
        for call in link_kernels(module, sources.__getitem__):
            if call not in self._begun:
                self._begun[call] = self._mosaic_threads.submit(call.compile)

    def wait(self) -> None:
        """Until all that was begun has ended; raises what one of them raised."""
        for kernel in self._begun.values():
            kernel.result()

    @property
    def done(self) -> bool:
        """Whether all that was begun has ended."""
        return all(kernel.done() for kernel in self._begun.values())

    def _begin_to_link(self, traced: ClosedJaxpr) -> list[Future[Any]]:
        begun = []
        for key, compile_kernel in kernels_in(traced).items():
            if isinstance(key, LoweredKernel):
                begun.append(
                    self._mosaic_threads.submit(key.lower, self._processes_to_lower().lower)
                )
            else:
                if key not in self._begun:
                    self._begun[key] = self._threads.submit(compile_kernel)
                begun.append(self._begun[key])
        return begun

    def _begin_mosaic(self, kernel: LoweredKernel) -> Future[None]:
        return self._mosaic_threads.submit(kernel.compile, self._processes_to_lower().lower)

    def _processes_to_lower(self) -> LoweringPool:
        if self._pool is None:
            self._pool = LoweringPool(self._processes)
        return self._pool


def _mosaic(traced: ClosedJaxpr) -> list[LoweredKernel]:
    return [kernel for kernel in kernels_in(traced) if isinstance(kernel, LoweredKernel)]
