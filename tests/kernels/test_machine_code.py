"""What one process compiles another one runs; for a GPU no GPU is needed."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import serialize_executable

from pallas_kernels import machine_code
from pallas_kernels.ahead import kernels_in
from pallas_kernels.device import Device, current_device, described
from pallas_kernels.kernel_pool import KernelPool
from pallas_kernels.lowered import LoweredKernel
from pallas_kernels.machine_code import Alone, take_over
from pallas_kernels.skinny_gemm.api import skinny_gemm

H200 = Device("gpu", "NVIDIA H200", "9.0")
X = jax.ShapeDtypeStruct((4,), jnp.float32)
HAS_CUDA = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def alone(function: Any, **more: Any) -> Alone:
    """A call of a function of one array, for this device."""
    exported = export.export(jax.jit(function))(X)
    module = exported.mlir_module_serialized
    return Alone("f", module, (X,), (X,), device=current_device(), **more)


def loaded(executable: bytes) -> jax.stages.Compiled:
    return serialize_executable.deserialize_and_load(*pickle.loads(executable))


def test_what_another_process_compiled_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    call = alone(lambda x: 2.0 * x + 1.0)
    with KernelPool(1, current_device()) as pool:
        executable = pool.run(call.compiled)
    (result,) = loaded(executable)(jnp.arange(4.0))
    np.testing.assert_array_equal(result, [1.0, 3.0, 5.0, 7.0])
    loads: list[Any] = []
    load = serialize_executable.deserialize_and_load
    monkeypatch.setattr(
        machine_code.serialize_executable,
        "deserialize_and_load",
        lambda *args, **more: loads.append(load(*args, **more)),
    )
    take_over(executable)
    assert len(loads) == 1


def test_arrays_are_changed_in_place() -> None:
    pool = jnp.ones(4)
    loaded(alone(lambda x: x + 1.0, in_place=(0,)).compiled())(pool)
    assert pool.is_deleted()
    kept = jnp.ones(4)
    loaded(alone(lambda x: x + 1.0).compiled())(kept)
    assert not kept.is_deleted()


@pytest.mark.skipif(not HAS_CUDA, reason="XLA's compiler for NVIDIA GPUs is in JAX's CUDA plugin")
def test_a_kernel_is_compiled_for_a_gpu_that_is_not_there() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 512), (512, 128))]
    with described(H200):
        (kernel,) = kernels_in(jax.jit(skinny_gemm).trace(*shapes).jaxpr)
    assert isinstance(kernel, LoweredKernel)
    made: list[bytes] = []
    kernel.lower()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pallas_kernels.lowered.take_over", made.append)
        kernel.compile()
    assert b"sm_90a" in made[0] or b"\x7fELF" in made[0]
