"""The toolchain's interface: compiles the kernels of steps beside the thread that traces them.

For each step call ``begin`` when it is traced, wait for the futures, call ``lower``, wait for those
futures, then let XLA compile it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Self

from jax.extend.core import ClosedJaxpr
from jax.stages import Lowered, Traced

from pallas_kernels.device import current_device
from pallas_kernels.toolchain.find import kernels_in
from pallas_kernels.toolchain.kernel_call import LoweredKernel, drop_sources
from pallas_kernels.toolchain.link import link_kernels
from pallas_kernels.toolchain.machine_code import KernelCall
from pallas_kernels.toolchain.pool import KernelError, KernelPool
from pallas_kernels.toolchain.triton_text import drop_triton_text

TRITON_THREADS = 8  # that compile kernels in Triton, which need Python's lock for a fifth of it
# Workers for kernels in Mosaic. An engine on an H200 lowers 60 of them, 0.1 to 1.5 s each, and
# compiles them and 7 calls of linked ones, 0.1 to 3 s each.
MOST_WORKERS = 14
# On two cores the kernels and steps of such an engine are lowered after 19 s with two workers,
# after 25 with one, and after 31 by this process alone.
FEWEST_WORKERS = 2
SPARE_CORES = 2  # for this process, which traces and compiles steps meanwhile
MOSAIC_THREADS = 64  # that wait for a worker: enough for all kernels of an engine


class Toolchain:
    """Compiles each kernel once, Triton's in threads and Mosaic's in worker processes.

    A kernel is begun by the first step that needs it. As a context manager it is closed at the end.
    """

    def __init__(self, cores: int) -> None:
        self._device = current_device()
        self._num_workers = max(FEWEST_WORKERS, min(cores - SPARE_CORES, MOST_WORKERS))
        self._triton_threads = ThreadPoolExecutor(TRITON_THREADS)
        self._mosaic_threads = ThreadPoolExecutor(MOSAIC_THREADS)
        self._pool: KernelPool | None = None  # made for the first kernel in Mosaic
        self._making_pool = Lock()
        self._closed = False
        self._begun: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; kernels that are not compiled yet are given up."""
        for threads in (self._triton_threads, self._mosaic_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        with self._making_pool:
            self._closed = True
            if self._pool is not None:
                self._pool.close()

    def start_workers(self) -> None:
        """Start the workers, which takes 1 to 3 s, before the first kernel needs them."""
        self._mosaic_threads.submit(self._workers)

    def begin(self, traced: Traced, *, link: bool = False) -> list[Future[Any]]:
        """Begin to compile the kernels of a traced step; returns what to wait for before ``lower``.

        A kernel that was begun before is not begun again. With ``link`` kernels in Mosaic are only
        lowered: ``lower`` links and compiles them.
        """
        wanted = []
        for key, compile_kernel in kernels_in(traced.jaxpr).items():
            if not isinstance(key, LoweredKernel):
                wanted.append(self._once(key, self._triton_threads, compile_kernel))
            elif link:
                lowering = ("lowered", key)
                wanted.append(self._once(lowering, self._mosaic_threads, self._lower, key))
            elif not key.compiled:
                wanted.append(self._once(key, self._mosaic_threads, self._compile, key))
        return wanted

    def lower(self, traced: Traced, *, link: bool = False) -> tuple[Lowered, list[Future[Any]]]:
        """Lower a step whose kernels are begun, with the same ``link``; returns it and what to wait
        for before XLA compiles it.
        """
        lowered = traced.lower()
        module = lowered.compiler_ir()  # changed in place: it is what JAX compiles
        drop_triton_text(module)
        return lowered, self._link(traced.jaxpr, module) if link else []

    def _link(self, traced: ClosedJaxpr, module: Any) -> list[Future[Any]]:  # an ir.Module
        """Link neighbouring kernels; begin to compile the calls and the kernels that are left."""
        kernels = [kernel for kernel in kernels_in(traced) if isinstance(kernel, LoweredKernel)]
        sources = {kernel: kernel.sources() for kernel in kernels}
        by_hash = {name: source for each in sources.values() for name, source in each.items()}
        linked = link_kernels(module, by_hash.__getitem__)
        hashes = drop_sources(module)
        lone = [each for each in kernels if hashes & sources[each].keys() and not each.compiled]
        calls = (*linked, *lone)
        return [self._once(each, self._mosaic_threads, self._compile, each) for each in calls]

    def _once(
        self, key: Hashable, threads: ThreadPoolExecutor, run: Callable[..., Any], *args: Any
    ) -> Future[Any]:
        if key not in self._begun:
            self._begun[key] = threads.submit(run, *args)
        return self._begun[key]

    def _lower(self, kernel: LoweredKernel) -> None:
        kernel.lower(self._workers().run)

    def _compile(self, kernel: LoweredKernel | KernelCall) -> None:
        kernel.compile(self._workers().run)

    def _workers(self) -> KernelPool:
        with self._making_pool:
            if self._closed:
                raise KernelError("no kernel is made any more")
            if self._pool is None:
                self._pool = KernelPool(self._num_workers, self._device)
            return self._pool
