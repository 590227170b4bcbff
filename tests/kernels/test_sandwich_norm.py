"""sandwich_norm: errors for bad arguments, refusals, and sums that other ops compute, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import select
from pallas_kernels.lib.numerics import rms_norm
from pallas_kernels.sandwich_norm.api import OP, sandwich_norm
from pallas_kernels.sandwich_norm.ref import NormRow, SandwichArgs

D = 8
X = jnp.arange(3.0 * D).reshape(3, D) / D
ROW = NormRow(jnp.full((2, D), 2.0), 1)
HALF = NormRow(jnp.full((2, D), 2.0, jnp.bfloat16), 1)
FITTING = SandwichArgs(
    x=X, outputs=(X,), output_norms=(None,), post=ROW, norms=(ROW,), eps=1e-6, output_eps=1e-6
)


def test_by_hand() -> None:
    factor = jnp.full(1, 0.5)
    args = replace(FITTING, outputs=(2 * X, X[None]), output_norms=(ROW, None), factor=factor)
    total, (normed,) = sandwich_norm(args)
    two = jnp.full(D, 2.0)
    expected = (X + rms_norm(rms_norm(2 * X, two, 1e-6) + X, two, 1e-6)) / 2
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(normed, rms_norm(expected, two, 1e-6), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"outputs": ()}, "with 0 outputs", id="no_output"),
        pytest.param({"outputs": (X, X, X)}, "with 3 outputs", id="outputs"),
        pytest.param({"output_norms": ()}, "0 norms are not one for each of 1", id="norms"),
        pytest.param({"outputs": (X[:2],)}, "partials .* do not fit tokens", id="tokens"),
        pytest.param({"post": NormRow(jnp.ones((1, 4)), 0)}, "do not fit weights", id="weights"),
        pytest.param({"norms": (replace(ROW, row=2),)}, "no row 2 in weights", id="row"),
        pytest.param({"factor": jnp.ones(2)}, "factor .2,. is not one number", id="factor"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sandwich_norm(replace(FITTING, **change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"norms": (ROW,) * 4}, "there are 4 norms", id="norms"),
        pytest.param({"x": X[:0]}, "there are no tokens", id="tokens"),
        pytest.param({"norms": (HALF,)}, "norms are bfloat16, not float32", id="dtype"),
        pytest.param({"pins": Pins((("residual_norm", "xla"),))}, "is pinned", id="pinned"),
    ],
)
def test_refusals_of_triton(change: dict[str, Any], reason: str) -> None:
    triton = OP.impls[0]
    assert triton.refuses("gpu", (FITTING,), {}) is None
    assert reason in (triton.refuses("gpu", (replace(FITTING, **change),), {}) or "")


def test_a_pinned_norm_is_used() -> None:
    args = replace(FITTING, pins=Pins((("residual_norm", "xla"),)))
    assert select(OP, "gpu", (args,), {}).name == "unfused"
    text = jax.jit(sandwich_norm).lower(args).as_text()
    assert "custom_call" not in text
