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


def check_against_the_recurrence(args: ref.DeltaPrefillArgs, form: Callable[..., Any]) -> None:
    expected, states = ref.delta_prefill(args)
    found, after = form(args)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    row = int(args.writes[0])
    np.testing.assert_allclose(after[row], states[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("by_channel", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("repeated", [False, True], ids=["decaying", "repeated"])
def test_chunks_equal_the_recurrence_over_4096_tokens(repeated: bool, by_channel: bool) -> None:
    args = arguments(4096, repeated=repeated, by_channel=by_channel)
    check_against_the_recurrence(args, xla.delta_prefill)


@pytest.mark.parametrize("form", [xla.delta_prefill, xla.used_chunks])
def test_strong_decays_of_single_channels_overflow_nowhere(form: Callable[..., Any]) -> None:
    """Over a chunk they add up to -1280, and others stay near 0; some tokens forget all."""
    args, rng = arguments(4096, by_channel=True), np.random.default_rng(7)
    shape = args.log_decay.shape
    log_decay = np.where(rng.random(shape) < 0.3, -20.0, -1e-3 * rng.random(shape))
    log_decay[..., :4], log_decay[..., 4:8], log_decay[1000:1100] = -1e-3, -20, -20
    args = replace(args, log_decay=jnp.asarray(log_decay, jnp.float32))
    check_against_the_recurrence(args, form)


@pytest.mark.parametrize("form", [xla.delta_prefill, xla.used_chunks])
@pytest.mark.parametrize(
    ("name", "by_channel"),
    [(name, False) for name in ("q", "k", "v", "log_decay", "beta")]
    + [(name, True) for name in ("q", "k", "log_decay")],
)
def test_gradients_equal_finite_differences(
    name: str, by_channel: bool, form: Callable[..., Any]
) -> None:
    """Over two borders of chunks; the direction is random."""
    args = arguments(150, by_channel=by_channel)
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
