"""The toolchain's interface: compiles kernels of steps while another thread traces steps.

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

from pallas_kernels.lib.device import current_device
from pallas_kernels.toolchain.find import kernels_in
from pallas_kernels.toolchain.kernel_call import LoweredKernel, drop_sources
from pallas_kernels.toolchain.link import link_kernels
from pallas_kernels.toolchain.machine_code import KernelCall
from pallas_kernels.toolchain.pool import KernelError, KernelPool
from pallas_kernels.toolchain.triton_text import drop_triton_text

TRITON_THREADS = 8  # that compile Triton kernels, which hold the GIL for a fifth of the time
# Worker processes for Mosaic kernels. An engine on an H200 lowers 60 kernels, 0.1 to 1.5 s each,
# and compiles them and 7 calls of linked kernels, 0.1 to 3 s each.
MAX_WORKERS = 14
# On two cores lowering the kernels and steps of such an engine takes 19 s with two workers, 25 s
# with one, and 31 s in this process.
MIN_WORKERS = 2
SPARE_CORES = 2  # for this process, which traces and compiles steps at the same time
MOSAIC_THREADS = 64  # that each wait for a worker: enough for all kernels of an engine


class Toolchain:
    """Compiles each kernel once, Triton's in threads and Mosaic's in worker processes.

    Compilation of a kernel starts with the first step that needs it. As a context manager it closes
    at the end.
    """

    def __init__(self, cores: int) -> None:
        self._device = current_device()
        self._num_workers = max(MIN_WORKERS, min(cores - SPARE_CORES, MAX_WORKERS))
        self._triton_threads = ThreadPoolExecutor(TRITON_THREADS)
        self._mosaic_threads = ThreadPoolExecutor(MOSAIC_THREADS)
        self._pool: KernelPool | None = None  # created for the first Mosaic kernel
        self._pool_lock = Lock()
        self._closed = False
        self._begun: dict[Hashable, Future[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; compilations that have not ended are cancelled."""
        for threads in (self._triton_threads, self._mosaic_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        with self._pool_lock:
            self._closed = True
            if self._pool is not None:
                self._pool.close()

    def start_workers(self) -> None:
        """Start the workers, which takes 1 to 3 s, before the first kernel needs them."""
        self._mosaic_threads.submit(self._workers)

    def begin(self, traced: Traced, *, link: bool = False) -> list[Future[Any]]:
        """Start to compile the kernels of a traced step; returns futures to wait for before
        ``lower``.

        A kernel is compiled once. With ``link`` Mosaic kernels are only lowered here; ``lower``
        links and compiles them.
        """
        futures = []
        for key, compile_kernel in kernels_in(traced.jaxpr).items():
            if not isinstance(key, LoweredKernel):
                futures.append(self._once(key, self._triton_threads, compile_kernel))
            elif link:
                lowering = ("lowered", key)
                futures.append(self._once(lowering, self._mosaic_threads, self._lower, key))
            elif not key.compiled:
                futures.append(self._once(key, self._mosaic_threads, self._compile, key))
        return futures

    def lower(self, traced: Traced, *, link: bool = False) -> tuple[Lowered, list[Future[Any]]]:
        """Lower a step after ``begin`` with the same ``link``; returns it and futures to wait for
        before XLA compiles it.
        """
        lowered = traced.lower()
        module = lowered.compiler_ir()  # JAX compiles this module, so it is changed in place
        drop_triton_text(module)
        return lowered, self._link(traced.jaxpr, module) if link else []

    def _link(self, traced: ClosedJaxpr, module: Any) -> list[Future[Any]]:  # an ir.Module
        """Link neighbouring kernels; start to compile the linked calls and the other kernels."""
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
        with self._pool_lock:
            if self._closed:
                raise KernelError("the toolchain is closed; no kernel can be compiled")
            if self._pool is None:
                self._pool = KernelPool(self._num_workers, self._device)
            return self._pool
