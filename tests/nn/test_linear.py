"""Norms, embedding rows and logits equal their definitions in float64; their dtypes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxinfer.nn import linear
from pallas_kernels.numerics import rms_norm
from pallas_kernels.pins import NO_PINS

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


def test_take_rows_clamps_ids_of_padding() -> None:
    table = f32(X)[0]
    rows = linear.take_rows(table, jnp.asarray([2, 99, -1], jnp.int32))
    assert np.array_equal(rows, table[jnp.asarray([2, 4, 0])])


def test_logits_are_float32_and_tied_equals_untied() -> None:
    hidden, embed = (jnp.asarray(a, jnp.bfloat16) for a in (X, RNG.standard_normal((7, 24))))
    tied = linear.tied_logits(hidden, embed, NO_PINS)
    untied = linear.head_logits(hidden, embed.T, NO_PINS)
    assert tied.dtype == untied.dtype == jnp.float32
    np.testing.assert_allclose(tied, untied, rtol=1e-5, atol=1e-5)
