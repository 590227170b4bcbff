"""The way to an engine in a process that has not imported JAX yet, which takes over a second.

Owns: ``start_engine`` and ``backend_starting``: JAX's backend starts while Python imports. A GPU's
takes most of a second that needs no GIL.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.collector import nothing_collected
from jaxinfer.core.config import (
    BUNDLE_MANIFEST,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    EngineConfig,
    bound_gpu_allocator,
    keep_xla_quiet,
    leave_out_line_info,
)
from jaxinfer.core.progress import Progress

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine


def start_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """See ``build.build_engine``, which this imports."""
    with backend_starting(config) as platform:
        from jaxinfer.engine.start.build import build_engine
    return build_engine(config, progress, platform)


@contextmanager
def backend_starting(config: EngineConfig) -> Generator[Callable[[], str]]:
    """Import within what needs JAX; its backend starts beside, and nothing is collected.

    Yields what waits for the backend: it returns its platform, or raises what kept it from
    starting. Nobody else tells: JAX has a CPU by then, and answers with that the next time.
    """
    with nothing_collected():
        import jax

        share = _allocators_share(config)
        if share is None:
            yield jax.default_backend
            return
        bound_gpu_allocator(share)
        keep_xla_quiet()
        leave_out_line_info()  # here: others must not change the environment while CUDA reads it
        started = Future[str]()
        # no daemon: a process that ends meanwhile must not unload CUDA under its feet
        threading.Thread(
            target=_start, args=(jax.default_backend, started), name="jax-backend"
        ).start()
        yield started.result


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


def _start(backend: Callable[[], str], started: Future[str]) -> None:
    try:
        started.set_result(backend())
    except BaseException as error:
        started.set_exception(error)
