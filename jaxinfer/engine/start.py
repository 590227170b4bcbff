"""The way to an engine in a process that has not imported JAX yet, which takes over a second.

Owns: ``start_engine`` and ``backend_starting``: JAX's backend starts while Python imports. A GPU's
takes most of a second that needs no GIL. Must not know: how an engine is built.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.config import (
    BUNDLE_MANIFEST,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    EngineConfig,
    bound_gpu_allocator,
)
from jaxinfer.core.progress import Progress

if TYPE_CHECKING:
    from jaxinfer.engine.engine import Engine


def start_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """See ``build.build_engine``, which this imports."""
    with backend_starting(config):
        from jaxinfer.engine.build import build_engine
    return build_engine(config, progress)


@contextmanager
def backend_starting(config: EngineConfig) -> Generator[None]:
    """Import within what needs JAX; its backend starts beside, and nothing is collected.

    A backend that does not start is no error here: whoever asks for a device gets that.
    """
    with nothing_collected():
        import jax

        share = _allocators_share(config)
        if share is not None:
            bound_gpu_allocator(share)
            # no daemon: a process that ends meanwhile must not unload CUDA under its feet
            threading.Thread(target=_start, args=(jax.default_backend,), name="jax-backend").start()
        yield


def _allocators_share(config: EngineConfig) -> float | None:
    """How much of a GPU is the allocator's, which must be known before; None of a bundle that
    cannot be read, which whoever opens it tells.
    """
    share = config.gpu_memory_utilization
    if share is None and config.bundle is not None:
        with suppress(OSError, ValueError, LookupError, TypeError):
            manifest = json.loads(Path(config.bundle, BUNDLE_MANIFEST).read_bytes())
            return manifest["settings"]["gpu_memory_utilization"] or DEFAULT_GPU_MEMORY_UTILIZATION
        return None
    return share or DEFAULT_GPU_MEMORY_UTILIZATION


def _start(backend: Callable[[], str]) -> None:
    with suppress(Exception):  # it fails again, with the same words, when it is asked for
        backend()


@contextmanager
def nothing_collected() -> Generator[None]:
    """Python's collector rests. It would look again and again at the 140,000 objects that importing
    JAX makes and that stay: a quarter of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
