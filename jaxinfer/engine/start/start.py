"""Builds an engine in a process that has not imported JAX yet, which takes over a second.

JAX's backend starts on a thread while Python imports; a GPU's takes most of a second, during which
it does not need the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.core.config import (
    BUNDLE_MANIFEST,
    DEFAULT_GPU_MEMORY_UTILIZATION,
    EngineConfig,
    prepare_backend,
)
from jaxinfer.core.errors import CacheError, ConfigError
from jaxinfer.core.host_memory import gc_paused
from jaxinfer.core.json_text import read_json
from jaxinfer.core.owners import check_tree
from jaxinfer.core.progress import NO_PROGRESS, Progress

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine


def start_engine(
    config: EngineConfig,
    progress: Progress = NO_PROGRESS,
    *,
    tell_plan: bool = False,
    serves_early: bool = False,
) -> Engine:
    """Plan and build an engine, importing both while JAX's backend starts.

    ``tell_plan``: what the settings became is a note, not a detail. ``serves_early``: see
    ``build_engine``.
    """
    with progress.phase("the engine starts"):
        with backend_starting(config) as platform:
            from jaxinfer.engine.start.build import build_engine, plan_engine
            from jaxinfer.engine.start.summary import describe_plan
        with gc_paused():
            plan = plan_engine(config, progress, platform)
            for line in describe_plan(config, plan):
                (progress.note if tell_plan else progress.detail)(line)
            return build_engine(plan, progress, serves_early=serves_early)


@contextmanager
def backend_starting(config: EngineConfig) -> Generator[Callable[[], str]]:
    """Start JAX's backend on a thread while the block imports modules that need JAX.

    Yields a function that waits for the backend and returns its platform, or raises the error of
    its start. The error is raised only once: afterwards JAX itself falls back to the CPU. The
    garbage collector is paused in the block. Raises ``ConfigError`` on a host other than 0.
    """
    if config.host_rank:
        raise ConfigError(
            f"host_rank is {config.host_rank}, and host 0 alone answers; on the others run "
            "`jaxinfer serve` or `jaxinfer generate`, which follow it"
        )
    with gc_paused():
        import jax

        share = _allocator_share(config)
        if share is None or config.hosts is not None:  # the hosts join before the backend starts
            yield jax.default_backend
            return
        prepare_backend(share)  # now: the environment must not change while CUDA reads it
        # its thread is no daemon: an exit must not unload CUDA while the backend starts
        pool = ThreadPoolExecutor(1, "jax-backend")
        started = pool.submit(jax.default_backend)
        pool.shutdown(wait=False)
        yield started.result


def _allocator_share(config: EngineConfig) -> float | None:
    """The share of a GPU for JAX's allocator, which has to be set before the backend starts.

    None if the bundle is unreadable or another user may change it; opening it reports the error.
    """
    share = config.gpu_memory_utilization
    if share is None and config.bundle is not None:
        folder = Path(config.bundle)
        with suppress(CacheError, OSError, ValueError, LookupError, TypeError):
            check_tree(folder)
            settings = read_json(folder / BUNDLE_MANIFEST)["settings"]
            return float(settings["gpu_memory_utilization"] or DEFAULT_GPU_MEMORY_UTILIZATION)
        return None
    return share or DEFAULT_GPU_MEMORY_UTILIZATION
