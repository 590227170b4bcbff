"""Kernels that are slow to lower are lowered once for all executables of a process."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from itertools import count
from types import MethodType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters.mlir import ir, make_ir_context

from pallas_kernels.harness.registry import imported_when_called
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.toolchain import machine_code
from pallas_kernels.toolchain.find import kernels_in
from pallas_kernels.toolchain.jax_internals import LOWERING_SETTINGS
from pallas_kernels.toolchain.kernel_call import LoweredKernel, call_lowered


class Kernel:
    """A function of two arrays that counts its traces."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x: jax.Array, y: jax.Array, *, scale: float) -> tuple[jax.Array, jax.Array]:
        self.traces += 1
        return x.astype(jnp.float32) @ y * scale, x


X, Y = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)
GPU = Device("gpu", "NVIDIA H200", "9.0")
MODULES = count()
TRACES = 2  # of a kernel that is lowered: for what it returns, and for its code

type Module = Callable[..., str]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Creates a module of Mosaic functions, with a name of its own for each test."""

    def of(language: str = "mosaic", **functions: Callable[..., Any]) -> str:
        name = f"op{next(MODULES)}.{language}"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))  # type: ignore[misc]
        return name

    return of


def test_executables_share_a_lowering(module: Module) -> None:
    kernel = Kernel()
    op = module(product=kernel)

    def layer(x: jax.Array, y: jax.Array) -> jax.Array:
        return call_lowered(op, "product", (x, y), {"scale": 2.0})[0]

    first = jax.jit(lambda x, y: layer(x, y) + layer(x, y)).lower(X, Y)
    second = jax.jit(lambda x, y: layer(x, y) - 1.0).lower(X, Y)
    assert kernel.traces == TRACES
    assert "product" in first.as_text()
    np.testing.assert_allclose(first.compile()(X, Y), 4.0 * X @ Y)
    np.testing.assert_allclose(second.compile()(X, Y), 2.0 * X @ Y - 1.0)


@pytest.mark.parametrize(
    ("x", "scale"),
    [(X[:1], 2.0), (X.astype(jnp.bfloat16), 2.0), (X, 3.0)],
    ids=["shape", "dtype", "static"],
)
def test_other_shapes_dtypes_and_sizes_have_another_kernel(
    x: Any, scale: float, module: Module
) -> None:
    kernel = Kernel()
    op = module(product=kernel)

    @jax.jit
    def both(x: jax.Array, other: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = call_lowered(op, "product", (x, y), {"scale": 2.0})[0]
        return one, call_lowered(op, "product", (other, y), {"scale": scale})[0]

    one, other = both(X, x, Y)
    assert kernel.traces == 2 * TRACES
    np.testing.assert_allclose(one, 2.0 * X @ Y)
    np.testing.assert_allclose(other, scale * x.astype(np.float32) @ Y)


@pytest.mark.parametrize(
    ("language", "device", "traces"),
    [("mosaic", GPU, TRACES), ("mosaic", Device("cpu", "cpu"), 3), ("triton", GPU, 3)],
)
def test_kernels_in_mosaic_are_lowered_once_on_a_gpu(
    language: str, device: Device, traces: int, module: Module
) -> None:
    kernel = Kernel()
    product = imported_when_called(module(language, product=kernel), "product")
    platform = "cuda" if device == GPU else "cpu"
    for shift in range(3):
        step = jax.jit(lambda x, y, n=shift: product(x, y, scale=1.0)[0] + n)
        with compiling_for(device):
            traced = step.trace(X, Y)
        traced.lower(lowering_platforms=(platform,))  # where nobody describes the device
    assert kernel.traces == traces


def test_a_kernel_with_a_ref_is_called_directly(module: Module) -> None:
    def increment(x: jax.Array, ref: jax.Ref, absent: None) -> jax.Array:
        ref[...] += 1.0
        return x + ref[...]

    def step(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        return kernel(x, ref, None) + jax.freeze(ref)

    kernel = imported_when_called(module(increment=increment), "increment")
    with compiling_for(GPU):
        np.testing.assert_allclose(jax.jit(step)(X), 3.0 * X + 2.0)


def test_an_array_may_be_absent(module: Module) -> None:
    def double(x: jax.Array, absent: None) -> jax.Array:
        assert absent is None
        return x + x

    op = module(double=double)
    result = jax.jit(lambda x: call_lowered(op, "double", (x, None), {}))(X)
    np.testing.assert_allclose(result, 2.0 * X)


SOURCE = "module @source_of_the_kernel {}"


def in_mosaic(x: jax.Array, absent: None) -> jax.Array:
    """Lowered like a Mosaic kernel: its source and its hash are attributes of the call."""
    assert absent is None  # such as the norms of a model that has none
    call = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, module=SOURCE, kernel_hash="as Mosaic has it")


def test_a_compiled_kernel_is_named_by_its_hash(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = module(in_mosaic=in_mosaic)

    def step(x: jax.Array) -> jax.Array:
        return call_lowered(op, "in_mosaic", (x, None), {}) + 1.0

    compiled: list[bytes] = []

    def run(method: MethodType) -> bytes:
        if method.__name__ == "lower":
            return method()
        compiled.append(method.__self__.complete_module())
        return b"machine code"

    taken: list[bytes] = []
    monkeypatch.setattr(machine_code, "preload_kernels", taken.append)
    traced = jax.jit(step).trace(X)
    before = traced.lower().as_text()
    (kernel,) = kernels_in(traced.jaxpr)
    assert isinstance(kernel, LoweredKernel)
    kernel.compile(run)
    kernel.compile(run)
    after = jax.jit(lambda x: step(x) * 2.0).trace(X).lower().as_text()
    assert [SOURCE.encode() in each for each in compiled] == [True, True]
    assert taken == [b"machine code"] * 2
    assert SOURCE in before
    assert SOURCE not in after
    with make_ir_context():
        its_hash = str(ir.StringAttr.get(hashlib.sha256(SOURCE.encode()).digest()))
    assert all(f"kernel_hash = {its_hash}" in text for text in (before, after))


def test_settings_are_restored(module: Module) -> None:
    during: list[dict[str, Any]] = []

    def settings() -> dict[str, Any]:
        return {name: getattr(jax.config, name) for name, _ in LOWERING_SETTINGS}

    def double(x: jax.Array) -> jax.Array:
        during.append(settings())
        return x + x

    before = settings()
    call_lowered(module(double=double), "double", (jnp.asarray(X),), {})
    assert during == [before, dict(LOWERING_SETTINGS)]
    assert settings() == before


def test_a_trace_needs_only_the_result_shapes(module: Module) -> None:
    """The lowering may be in progress in another process; it is requested once."""
    kernel = Kernel()
    op, asked = module(product=kernel), []

    def run(method: MethodType) -> bytes:
        asked.append((method.__name__, str(method.__self__)))
        return method()

    step = jax.jit(lambda x, y: call_lowered(op, "product", (x, y), {"scale": 3.0}))
    traced = step.trace(X, Y)
    assert kernel.traces == 1
    (made,) = kernels_in(traced.jaxpr)
    assert isinstance(made, LoweredKernel)
    made.compile(run)
    np.testing.assert_allclose(traced.lower().compile()(X, Y)[0], 3.0 * X @ Y)
    assert kernel.traces == TRACES
    called = f"{op}.product(float32[2, 3], float32[3, 4])"
    assert asked == [("lower", called)]


@pytest.mark.parametrize("said", [("float32", 2, 3), ("int32", 3), ("float32", 3)])
def test_declared_result_shapes_must_be_right(said: tuple[Any, ...], module: Module) -> None:
    """JAX itself would convert integers."""
    dtype, *shape = said
    kernel = Kernel()
    op = module(product=lambda x: kernel(x, x, scale=1.0)[0].sum(0))

    def step(x: jax.Array) -> jax.Array:
        results = lambda x: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
        return call_lowered(op, "product", (x,), {}, results)

    traced = jax.jit(step).trace(X[:, :2])
    assert not kernel.traces
    with pytest.raises(ValueError, match=r"returns float32\[2\], not "):
        traced.lower()


def test_kernels_have_no_derivative(module: Module) -> None:
    op = module(double=lambda x: x + x)
    with pytest.raises(ValueError, match="double.* has no derivative"):
        jax.grad(lambda x: call_lowered(op, "double", (x,), {}).sum())(X)
