"""Kernels that are slow to lower are lowered once for all executables of a process."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import registry
from pallas_kernels.ahead import kernels_in
from pallas_kernels.lowered import call_lowered
from pallas_kernels.registry import imported_when_called


class Kernel:
    """A function of two arrays that counts its traces."""

    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x: jax.Array, y: jax.Array, *, scale: float) -> tuple[jax.Array, jax.Array]:
        self.traces += 1
        return x.astype(jnp.float32) @ y * scale, x


X, Y = np.ones((2, 3), np.float32), np.arange(12, dtype=np.float32).reshape(3, 4)


def test_executables_share_a_lowering() -> None:
    kernel = Kernel()

    def layer(x: jax.Array, y: jax.Array) -> jax.Array:
        return call_lowered("product", kernel, (x, y), {"scale": 2.0})[0]

    first = jax.jit(lambda x, y: layer(x, y) + layer(x, y)).lower(X, Y)
    second = jax.jit(lambda x, y: layer(x, y) - 1.0).lower(X, Y)
    assert kernel.traces == 1
    assert "product" in first.as_text()
    np.testing.assert_allclose(first.compile()(X, Y), 4.0 * X @ Y)
    np.testing.assert_allclose(second.compile()(X, Y), 2.0 * X @ Y - 1.0)


@pytest.mark.parametrize(
    ("x", "scale"),
    [(X[:1], 2.0), (X.astype(jnp.bfloat16), 2.0), (X, 3.0)],
    ids=["shape", "dtype", "static"],
)
def test_of_other_shapes_types_and_sizes_there_is_another(x: Any, scale: float) -> None:
    kernel = Kernel()

    @jax.jit
    def both(x: jax.Array, other: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        one = call_lowered("product", kernel, (x, y), {"scale": 2.0})[0]
        return one, call_lowered("product", kernel, (other, y), {"scale": scale})[0]

    one, other = both(X, x, Y)
    assert kernel.traces == 2
    np.testing.assert_allclose(one, 2.0 * X @ Y)
    np.testing.assert_allclose(other, scale * x.astype(np.float32) @ Y)


@pytest.mark.parametrize(
    ("module", "platform", "traces"),
    [("op.mosaic", "gpu", 1), ("op.mosaic", "cpu", 2), ("op.triton", "gpu", 2)],
)
def test_kernels_in_mosaic_are_lowered_once_on_a_gpu(
    module: str, platform: str, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(product=kernel))  # type: ignore[misc]
    monkeypatch.setattr(registry, "current_platform", lambda: platform)
    product = imported_when_called(module, "product")
    for shift in range(2):
        jax.jit(lambda x, y, n=shift: product(x, y, scale=1.0)[0] + n).lower(X, Y)
    assert kernel.traces == traces


def test_a_kernel_that_is_handed_a_reference_is_called_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def increment(x: jax.Array, ref: jax.Ref, absent: None) -> jax.Array:
        ref[...] += 1.0
        return x + ref[...]

    def step(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        return kernel(x, ref, None) + jax.freeze(ref)

    monkeypatch.setitem(sys.modules, "op.mosaic", SimpleNamespace(increment=increment))  # type: ignore[misc]
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    kernel = imported_when_called("op.mosaic", "increment")
    np.testing.assert_allclose(jax.jit(step)(X), 3.0 * X + 2.0)


def test_an_array_may_be_absent() -> None:
    def double(x: jax.Array, absent: None) -> jax.Array:
        assert absent is None
        return x + x

    result = jax.jit(lambda x: call_lowered("double", double, (x, None), {}))(X)
    np.testing.assert_allclose(result, 2.0 * X)


def in_mosaic(x: jax.Array) -> jax.Array:
    """Lowered like a kernel in Mosaic: its source and its hash are attributes of the call."""
    call = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct(x.shape, x.dtype))
    return call(x, module="source of the kernel", kernel_hash="its hash")


def test_a_compiled_kernel_is_named_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: jax.Array) -> jax.Array:
        return call_lowered("in_mosaic", in_mosaic, (x,), {}) + 1.0

    compiled: list[str] = []
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda lowered: compiled.append(lowered.as_text())
    )
    traced = jax.jit(step).trace(X)
    before = traced.lower().as_text()
    (compile_ahead,) = kernels_in(traced.jaxpr).values()
    compile_ahead()
    compile_ahead()
    after = jax.jit(lambda x: step(x) * 2.0).trace(X).lower().as_text()
    assert all("source of the kernel" in text for text in (before, *compiled[:1]))
    assert "source of the kernel" not in after
    assert all("its hash" in text for text in (before, *compiled, after))


def test_no_setting_stays_changed() -> None:
    before = jax.config.jax_export_ignore_forward_compatibility
    call_lowered("product", Kernel(), (jnp.asarray(X), jnp.asarray(Y)), {"scale": 5.0})
    assert jax.config.jax_export_ignore_forward_compatibility == before
