"""residual_norm: the same bits as the formulas, a gradient, and errors for bad arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lib.numerics import rms_norm
from pallas_kernels.residual_norm import launch
from pallas_kernels.residual_norm.api import NormArgs, residual_norm

RNG = np.random.default_rng(0)
X, DELTA, WEIGHTS = (
    jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((7, 576), (7, 576), (2, 576))
)
EPS = 1e-6
ARGS = NormArgs(x=X, partials=DELTA, weights=WEIGHTS, row=0, eps=EPS)


def test_the_bits_of_the_formulas_it_replaces() -> None:
    total, normed = residual_norm(replace(ARGS, row=1), "xla")
    assert np.array_equal(total, X + DELTA)
    assert np.array_equal(normed, jax.jit(rms_norm, static_argnums=2)(X + DELTA, WEIGHTS[1], EPS))


def test_without_partials_the_sum_is_x() -> None:
    total, normed = residual_norm(replace(ARGS, partials=None), "xla")
    assert np.array_equal(total, X)
    assert np.array_equal(normed, jax.jit(rms_norm, static_argnums=2)(X, WEIGHTS[0], EPS))


def test_plain_xla_differentiates() -> None:
    def of_delta(delta: jax.Array) -> jax.Array:
        return residual_norm(replace(ARGS, partials=delta), "xla")[1].sum()

    def of_partials(delta: jax.Array) -> jax.Array:
        partials = jnp.stack([delta, 0 * delta])
        return residual_norm(replace(ARGS, partials=partials), "xla")[1].sum()

    gradient = jax.grad(of_delta)(DELTA)
    assert np.any(gradient)
    np.testing.assert_allclose(jax.grad(of_partials)(DELTA), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"weights": jnp.zeros(576)}, "do not fit weights", id="weights"),
        pytest.param({"weights": jnp.zeros((2, 64))}, "do not fit weights", id="width"),
        pytest.param({"row": 2}, r"no row 2 in weights \(2, 576\)", id="row"),
        pytest.param({"partials": DELTA[1:]}, "partials .* do not fit tokens", id="tokens"),
        pytest.param({"partials": DELTA[None, :0]}, "partials .* do not fit", id="no_tokens"),
        pytest.param({"partials": jnp.zeros((0, 7, 576))}, "partials .* do not fit", id="no_parts"),
        pytest.param({"partials": DELTA.astype(jnp.bfloat16)}, "bfloat16, not float32", id="dtype"),
        pytest.param({"partials": DELTA[None].astype(jnp.bfloat16)}, "not float32", id="narrow"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        residual_norm(replace(ARGS, **change))


@pytest.mark.parametrize(
    ("x", "weights", "reason"),
    [
        pytest.param((1, 2560), "bfloat16", None, id="fits"),
        pytest.param((8192, 8192), "bfloat16", None, id="largest"),
        pytest.param((1, 8193), "bfloat16", "8193 components are above 8192", id="width"),
        pytest.param((0, 64), "bfloat16", "no tokens", id="tokens"),
        pytest.param((1, 64), "float16", "are float16, not bfloat16 or float32", id="weights"),
    ],
)
def test_calls_of_the_kernel(x: tuple[int, int], weights: str, reason: str | None) -> None:
    tokens: Any = jax.ShapeDtypeStruct(x, jnp.bfloat16)
    norms: Any = jax.ShapeDtypeStruct((2, x[1]), jnp.dtype(weights))
    found = launch.supports(NormArgs(x=tokens, weights=norms, row=0, eps=EPS))
    assert found is reason if reason is None else reason in str(found)


@pytest.mark.parametrize(("tile", "expected"), [(64, 1), (1024, 4), (4096, 16), (8192, 16)])
def test_warps(tile: int, expected: int) -> None:
    assert launch.num_warps(tile) == expected


@pytest.mark.parametrize(
    ("partials", "tile", "expected"),
    [
        pytest.param(0, 4096, 1, id="no_parts"),
        pytest.param(8, 4096, 8, id="all"),
        pytest.param(8, 8192, 4, id="wide_rows_in_two_batches"),
    ],
)
def test_loads_in_flight(partials: int, tile: int, expected: int) -> None:
    assert launch.loads_in_flight(partials, tile) == expected
