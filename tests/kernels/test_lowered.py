"""Kernels that are slow to lower are lowered once for all executables of a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lowered import call_lowered
from pallas_kernels.registry import LOWERED_ONCE, Impl, all_ops, dispatch


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


@pytest.mark.parametrize(("name", "traces"), [(LOWERED_ONCE, 1), ("xla", 2)])
def test_dispatch_lowers_mosaic_once(name: str, traces: int) -> None:
    kernel = Kernel()
    op = replace(all_ops()[0], impls=(Impl(name, kernel),))
    for shift in range(2):
        jax.jit(lambda x, y, n=shift: dispatch(op, (x, y), {"scale": 1.0}, None)[0] + n).lower(X, Y)
    assert kernel.traces == traces


def test_mosaic_kernels_are_called_so() -> None:
    named = {op.name for op in all_ops() for impl in op.impls if impl.name == LOWERED_ONCE}
    assert {"paged_prefill", "skinny_gemm"} <= named


def test_no_setting_stays_changed() -> None:
    before = jax.config.jax_export_ignore_forward_compatibility
    call_lowered("product", Kernel(), (jnp.asarray(X), jnp.asarray(Y)), {"scale": 5.0})
    assert jax.config.jax_export_ignore_forward_compatibility == before
