"""The gated delta rule by chunks equals the recurrence over thousands of tokens, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_prefill import cases, ref, xla
from pallas_kernels.delta_prefill.cases import DeltaCase


def arguments(num_tokens: int, **more: Any) -> ref.DeltaPrefillArgs:
    (args,) = cases.build(DeltaCase("", (num_tokens,), **more), seed=3).args
    return jax.tree.map(jnp.asarray, args)


@pytest.mark.parametrize("repeated", [False, True], ids=["decaying", "repeated"])
def test_chunks_equal_the_recurrence_over_4096_tokens(repeated: bool) -> None:
    args = arguments(4096, repeated=repeated)
    expected, states = ref.delta_prefill(args)
    found, after = xla.delta_prefill(args)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    row = int(args.writes[0])
    np.testing.assert_allclose(after[row], states[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", [xla.delta_prefill, xla.used_chunks])
@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "beta"])
def test_gradients_equal_finite_differences(name: str, form: Callable[..., Any]) -> None:
    """Over two borders of chunks; the direction is random."""
    args = arguments(150)
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.standard_normal(args.v.shape, np.float32))

    def loss(value: jax.Array) -> jax.Array:
        out, states = jax.jit(form)(replace(args, **{name: value}))
        return jnp.sum(out * weights) + jnp.sum(states[args.writes[0]])

    at = getattr(args, name)
    direction = jnp.asarray(rng.standard_normal(at.shape, np.float32))
    along = float(jnp.vdot(jax.grad(loss)(at), direction))
    step = 1e-3
    difference = float(loss(at + step * direction) - loss(at - step * direction)) / (2 * step)
    assert difference == pytest.approx(along, rel=2e-2, abs=2e-2)
