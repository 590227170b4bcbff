"""One process compiles, another one runs; compiling for a GPU needs no GPU."""

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

from pallas_kernels.lib.device import Device, compiling_for, current_device
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm
from pallas_kernels.toolchain.find import kernels_in
from pallas_kernels.toolchain.kernel_call import LoweredKernel
from pallas_kernels.toolchain.machine_code import KernelCall, preload_kernels
from pallas_kernels.toolchain.pool import KernelPool

X = jax.ShapeDtypeStruct((4,), jnp.float32)
HAS_CUDA = any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def call_of(function: Any, in_place: tuple[int, ...] = ()) -> KernelCall:
    """A call for this device, with a function of one array instead of a kernel."""
    module = export.export(jax.jit(function))(X).mlir_module_serialized
    return KernelCall("f", current_device(), module, (X,), (X,), in_place)


def loaded(executable: bytes) -> jax.stages.Compiled:
    return serialize_executable.deserialize_and_load(*pickle.loads(executable))


def test_an_executable_of_another_process_runs_here() -> None:
    with KernelPool(1, current_device()) as pool:
        executable = pool.run(call_of(lambda x: 2.0 * x + 1.0).compiled)
    (result,) = loaded(executable)(jnp.arange(4.0))
    np.testing.assert_array_equal(result, [1.0, 3.0, 5.0, 7.0])


def test_kernels_are_preloaded_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[dict[str, Any]] = []
    load = serialize_executable.deserialize_and_load

    def noted(*args: Any, **more: Any) -> None:
        load(*args, **more)
        loads.append(more)

    monkeypatch.setattr(serialize_executable, "deserialize_and_load", noted)
    call_of(lambda x: x + 1.0).compile()
    assert loads == [{"backend": jax.devices()[0].client, "execution_devices": jax.devices()[:1]}]
    with pytest.raises(pickle.UnpicklingError):
        preload_kernels(b"no executable")


def test_arrays_are_changed_in_place() -> None:
    pool, kept = jnp.ones(4), jnp.ones(4)
    loaded(call_of(lambda x: x + 1.0, in_place=(0,)).compiled())(pool)
    loaded(call_of(lambda x: x + 1.0).compiled())(kept)
    assert pool.is_deleted() and not kept.is_deleted()


@pytest.mark.skipif(not HAS_CUDA, reason="XLA's compiler for NVIDIA GPUs is in JAX's CUDA plugin")
def test_a_kernel_is_compiled_for_an_absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 512), (512, 128)))
    args: Any = GemmArgs(x=x, w=w)  # type: ignore[arg-type]
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        (kernel,) = kernels_in(jax.jit(skinny_gemm).trace(args).jaxpr)
    assert isinstance(kernel, LoweredKernel)
    made: list[bytes] = []
    monkeypatch.setattr("pallas_kernels.toolchain.machine_code.preload_kernels", made.append)
    kernel.compile()
    (executable,) = made
    assert b"\x7fELF" in executable and b"skinny_gemm" in executable
