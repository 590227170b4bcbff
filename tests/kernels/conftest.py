"""Fixtures of all kernel tests: JAX's interpreter for Mosaic kernels, and a compilation cache for
the definitions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import callback as jax_callback
from jax._src import xla_bridge
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.pallas import mosaic_gpu as plgpu

# A barrier of an interpreted Mosaic kernel blocks a thread of XLA's pool until the other warpgroups
# arrive, whose operations need threads of the same pool. XLA makes a thread for each core unless
# this variable says otherwise: with two cores, three of five runs of some tests did not end.
NUM_THREADS = 16
FEW_THREADS = (  # they were made with the process's first array
    xla_bridge.backends_are_initialized()
    and int(os.environ.get("PJRT_NPROC") or os.cpu_count() or 1) < NUM_THREADS
)
os.environ.setdefault("PJRT_NPROC", str(NUM_THREADS))


@pytest.fixture(scope="package", autouse=True)
def compilations_are_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compilations are shared with the processes of Triton's interpreter, in a new folder.

    Not for other tests: an executable that JAX has read from its cache cannot be saved in a bundle.
    """
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        reset_cache()  # JAX decides only once whether there is a cache
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


def _call_with_numpy(*args: Any, callback: Any, **_: Any) -> Any:
    """Replaces JAX's ``io_callback_impl``, which converts each number to a JAX array first.

    These conversions took two thirds of the interpreter's time. Arguments are copied, since their
    memory is invalid after the call.
    """
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


@pytest.fixture(autouse=True, scope="package")
def interpreted_with_numpy() -> Iterator[None]:
    """Pallas' interpreter uses numpy arrays, and has enough threads."""
    if FEW_THREADS:
        pytest.fail("another test module made XLA's threads: run tests/kernels in its own process")
    to_int = shared_memory._to_int
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_callback, "io_callback_impl", _call_with_numpy)
        patch.setattr(
            shared_memory,
            "_to_int",
            lambda x: int(x) if isinstance(x, np.ndarray | np.generic) else to_int(x),
        )
        yield


@pytest.fixture(autouse=True)
def without_dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programmatic dependent launch is a no-op in the interpreter, which runs one kernel at a time.

    Kernels that are lowered for a GPU still contain it.
    """
    force = plgpu.force_gpu_interpret_mode

    @contextmanager
    def force_without_launch(params: plgpu.InterpretGPUParams) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, force(params):
            patch.setattr(plgpu, "griddepcontrol_launch_dependents", lambda: None)
            patch.setattr(plgpu, "griddepcontrol_wait", lambda: None)
            yield

    monkeypatch.setattr(plgpu, "force_gpu_interpret_mode", force_without_launch)
