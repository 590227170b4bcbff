"""Norms equal their definitions in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxinfer.nn import linear
from pallas_kernels.lib.numerics import rms_norm

RNG = np.random.default_rng(0)
X, WEIGHT, BIAS = RNG.standard_normal((5, 24)), RNG.standard_normal(24), RNG.standard_normal(24)


def f32(*arrays: np.ndarray) -> list[jnp.ndarray]:
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def test_rms_norm() -> None:
    expected = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-3) * WEIGHT
    np.testing.assert_allclose(rms_norm(*f32(X, WEIGHT), 1e-3), expected, rtol=1e-5)


def test_layer_norm() -> None:
    expected = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-3)
    expected = expected * WEIGHT + BIAS
    actual = linear.layer_norm(*f32(X, WEIGHT, BIAS), 1e-3)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_layer_norm_of_a_large_constant_offset_is_precise() -> None:
    """A variance computed in one pass would cancel here."""
    shifted = linear.layer_norm(*f32(X + 1000.0, WEIGHT, BIAS), 1e-5)
    plain = linear.layer_norm(*f32(X, WEIGHT, BIAS), 1e-5)
    np.testing.assert_allclose(shifted, plain, atol=2e-3)
