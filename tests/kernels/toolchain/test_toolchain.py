"""Kernels are compiled while steps are traced: each once, Mosaic's in worker processes."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lib.device import Device, current_device
from pallas_kernels.toolchain import api
from pallas_kernels.toolchain.api import MAX_WORKERS, MIN_WORKERS, Toolchain
from pallas_kernels.toolchain.jax_internals import MODULE, MOSAIC_CALL, attribute_of, custom_calls
from pallas_kernels.toolchain.kernel_call import Kernel, LoweredKernel, call_lowered
from pallas_kernels.toolchain.pool import KernelError

X = np.ones((2, 3), np.float32)


def traced(*names: str) -> jax.stages.Traced:
    """A step with functions of ``jax.numpy`` instead of kernels."""

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        for name in names:
            x = call_lowered("jax.numpy", name, (x,), {})
        return x

    return step.trace(X)


class Pool:
    """Counts pools, and lowers and compiles kernels in this process."""

    sizes: list[int]

    def __init__(self, size: int, device: Device) -> None:
        assert device == current_device()
        self.sizes.append(size)

    def run(self, method: MethodType) -> bytes:
        return method()

    def close(self) -> None:
        self.sizes.append(0)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(api, "KernelPool", Pool)
    monkeypatch.setattr(Pool, "sizes", [], raising=False)
    return Pool.sizes


def test_workers_compile_the_kernels_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = traced("sin", "cos")
    called: list[Kernel] = []
    lower = Kernel.lower

    @wraps(lower)
    def noted(kernel: Kernel) -> bytes:
        called.append(kernel)
        return lower(kernel)

    monkeypatch.setattr(Kernel, "lower", noted)
    with Toolchain(cores=2) as toolchain:
        for kernel in toolchain.begin(step):
            kernel.result()
    np.testing.assert_allclose(step.lower().compile()(X), np.cos(np.sin(X)), rtol=1e-6)
    assert not called  # as this process has no need to lower


@pytest.mark.parametrize(
    ("cores", "made"),
    [(2, MIN_WORKERS), (8, 6), (128, MAX_WORKERS)],
)
def test_one_worker_per_spare_core(
    cores: int, made: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def compile_kernel(self: LoweredKernel, run: Any) -> None:
        compiled.append(self.kernel.name)

    monkeypatch.setattr(LoweredKernel, "compile", compile_kernel)
    with Toolchain(cores) as toolchain:
        first = toolchain.begin(traced("sinh", "cosh"))
        second = toolchain.begin(traced("tanh", "cosh"))
        for kernel in (*first, *second):
            kernel.result()
    assert sorted(compiled) == ["cosh", "sinh", "tanh"]
    assert first[1] is second[1]
    assert sizes == [made, 0]


def test_without_mosaic_kernels_no_worker_starts(sizes: list[int]) -> None:
    with Toolchain(cores=16) as toolchain:
        assert toolchain.begin(jax.jit(jnp.sin).trace(X)) == []
    assert not sizes


def test_workers_may_start_before_the_first_kernel(sizes: list[int]) -> None:
    with Toolchain(cores=2) as toolchain:
        toolchain.start_workers()
        for kernel in toolchain.begin(traced("expm1")):
            kernel.result()
    assert sizes == [MIN_WORKERS, 0]


def test_no_worker_starts_after_close(sizes: list[int]) -> None:
    with Toolchain(cores=2) as toolchain:
        pass
    with pytest.raises(KernelError):  # as a thread may come to, which was asked to in time
        toolchain._workers()
    assert not sizes


def test_a_compiled_kernel_is_not_compiled_again(sizes: list[int]) -> None:
    step = traced("arcsinh")
    with Toolchain(cores=2) as toolchain:
        (kernel,) = toolchain.begin(step)
        kernel.result()
    assert sizes.pop() == 0 and sizes.pop()
    with Toolchain(cores=2) as other:
        assert other.begin(step) == []
    assert not sizes


def test_kernels_of_a_step_to_link_are_only_lowered(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[str] = []

    def lower(self: LoweredKernel, _: Any) -> None:
        lowered.append(self.kernel.name)

    monkeypatch.setattr(LoweredKernel, "lower", lower)
    monkeypatch.setattr(LoweredKernel, "compile", None)
    with Toolchain(cores=2) as toolchain:
        for step in (traced("arccosh", "arctan"), traced("arctan")):
            for kernel in toolchain.begin(step, link=True):
                kernel.result()
    assert sorted(lowered) == ["arccosh", "arctan"]
    assert sizes == [MIN_WORKERS, 0]


@dataclass(frozen=True)
class Call:
    """Stands for a call of linked kernels; equal to other calls of the same kernels."""

    name: str
    compiled: list[str] = field(compare=False)
    fails: bool = False

    def compile(self, run: Any) -> None:
        if self.fails:
            raise ValueError(f"{self.name} cannot be compiled")
        self.compiled.append(self.name)


def test_linked_calls_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(api, "link_kernels", lambda *_: [Call("a", compiled), Call("b", compiled)])
    step = jax.jit(jnp.sin).trace(X)
    with Toolchain(cores=2) as toolchain:
        calls = [toolchain.lower(step, link=True)[1] for _ in range(2)]
        assert calls[0] == calls[1] and len(calls[0]) == 2
        wait(calls[0])
    assert sorted(compiled) == ["a", "b"]


def test_an_error_of_a_linked_call_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "link_kernels", lambda *_: [Call("a", [], fails=True)])
    step = jax.jit(jnp.sin).trace(X)
    with Toolchain(cores=2) as toolchain:
        _, (call,) = toolchain.lower(step, link=True)
        with pytest.raises(ValueError, match="a cannot be compiled"):
            call.result()


def test_a_kernel_without_neighbours_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all are replaced by their hashes."""
    step, compiled = traced("arctanh", "log1p"), list[str]()
    hashes = {"arctanh": b"one", "log1p": b"other"}

    def compile_kernel(self: LoweredKernel, _: Any) -> None:
        compiled.append(self.kernel.name)

    def sources(self: LoweredKernel) -> dict[bytes, bytes]:
        return {hashes[self.kernel.name]: b"module"}

    monkeypatch.setattr(LoweredKernel, "compile", compile_kernel)
    monkeypatch.setattr(LoweredKernel, "sources", sources)
    monkeypatch.setattr(api, "link_kernels", lambda *_: [Call("linked", compiled)])

    def left(x: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = jax.ffi.ffi_call(MOSAIC_CALL, out)
        return call(call(x, kernel_hash="linked", module="a"), kernel_hash="one", module="b")

    lowered = jax.jit(left).trace(X).lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(jax.stages.Traced, "lower", lambda _: lowered)
    with Toolchain(cores=2) as toolchain:
        wait(toolchain.lower(step, link=True)[1])
    module = lowered.compiler_ir()
    assert sorted(compiled) == ["arctanh", "linked"]
    with module.context:
        assert [attribute_of(c, MODULE) for c in custom_calls(module.operation, MOSAIC_CALL)] == [
            b"", b"",
        ]  # fmt: skip
