"""The mixture of experts of a layer equals its formula, with everything that a family may have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.base import forward
from jaxinfer.nn.context import Rows, StepContext, dense_context
from jaxinfer.nn.decoder_config import ExpertsConfig, FeedForwardConfig
from jaxinfer.nn.linear import Norm, Stream, added
from kit.tiny_models import tiny_model
from pallas_kernels.experts.stack import Activation
from pallas_kernels.route.routing import Groups, Routing

T, D = 9, 16
SHARED = FeedForwardConfig(width=20, activation="silu", gated=True)
CONFIG = ExpertsConfig(
    count=6,
    width=12,
    routing=Routing(2, "sigmoid", True, 2.5, Groups(3, 2, "best_two")),
    activation=Activation(limit=1.0, alpha=1.5, shift=0.5),
    bias=True,
    router_bias=True,
    choice_bias=True,
    shared=SHARED,
)
X = np.random.default_rng(0).standard_normal((T, D)).astype(np.float32)
NORM = Norm(jnp.ones((1, D)), 0, 1e-5)


def params_of(config: ExpertsConfig) -> Any:
    e, f = config.count, config.width
    shapes: dict[str, Any] = {"router": (e, D), "gate_up": (e, 2 * f, D), "down": (e, D, f)}
    shapes |= {"gate_up_bias": (e, 2 * f), "down_bias": (e, D), "router_bias": (e,)}
    shapes |= {"choice_bias": (e,), "shared": {"gate_up": (D, 40), "down": (20, D)}}
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda shape: rng.standard_normal(shape).astype(np.float32) / 2,
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def applied(config: ExpertsConfig, params: Any, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
    variables = {"params": jax.tree.map(jnp.asarray, params)}
    return config.module().apply(variables, Stream(jnp.asarray(X)), NORM, ctx)  # type: ignore[return-value]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def expected(p: Any) -> np.ndarray:
    h = X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-5)
    scores = sigmoid(h @ p["router"].T + p["router_bias"])
    ranks = scores + p["choice_bias"]
    out = np.zeros((T, D))
    for t in range(T):
        groups = ranks[t].reshape(3, 2).sum(1)
        allowed = np.repeat(np.isin(np.arange(3), np.argsort(-groups)[:2]), 2)
        chosen = np.argsort(-np.where(allowed, ranks[t], -np.inf))[:2]
        for e in chosen:
            gate, up = np.split(p["gate_up"][e] @ h[t] + p["gate_up_bias"][e], 2)
            gate, up = np.minimum(gate, 1), np.clip(up, -1, 1)
            y = p["down"][e] @ (gate * sigmoid(1.5 * gate) * (up + 0.5)) + p["down_bias"][e]
            out[t] += 2.5 * scores[t, e] / scores[t, chosen].sum() * y
    gate, up = np.split(h @ p["shared"]["gate_up"], 2, axis=1)
    return out + (gate * sigmoid(gate) * up) @ p["shared"]["down"]


def test_the_formula() -> None:
    params = params_of(CONFIG)
    x, out = applied(CONFIG, params, dense_context(T))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_allclose(out, expected(params), rtol=1e-4, atol=1e-5)


def test_padding_tokens_choose_nothing() -> None:
    """Their experts, of which the weights are NaN, are not read."""
    config = replace(CONFIG, shared=None, routing=Routing(1), choice_bias=False, router_bias=False)
    params = params_of(config)
    h = X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-5)
    own = np.argmax(h @ params["router"].T, axis=1)
    params["gate_up"][own[0]] = np.nan
    real = own != own[0]
    assert real.any()
    nothing = jnp.zeros(0, jnp.int32)
    rows = Rows(nothing, jnp.asarray(real), *[nothing] * 4)
    ctx = replace(dense_context(T), rows=rows)
    _, out = applied(config, params, ctx)
    assert np.isfinite(out).all()
    assert np.abs(out[real]).min(axis=0).any() and not np.any(np.asarray(out)[~real])


@pytest.mark.parametrize("routing", ["same", "uniform"])
def test_padding_tokens_choose_nothing_with_dummy_routing(routing: str) -> None:
    config = replace(CONFIG, shared=None, dummy_routing=routing)
    real, nothing = jnp.arange(T) % 2 == 0, jnp.zeros(0, jnp.int32)
    ctx = replace(dense_context(T), rows=Rows(nothing, real, *[nothing] * 4))
    _, out = applied(config, params_of(config), ctx)
    assert np.any(out[real], axis=1).all() and not np.any(out[~real])


def test_dummy_routing_replaces_the_choices_of_a_model() -> None:
    """Its router gives all experts the same score, so that every token would choose the first."""
    model, params = tiny_model("mixtral")
    (layer,), ids = model.config.layers, jnp.arange(40)
    assert isinstance(layer.ffn, ExpertsConfig)
    own = params["layers_0"]
    params = params | {"layers_0": own | {"router": jnp.zeros_like(own["router"])}}
    chosen: dict[str, np.ndarray] = {}
    for routing in ("same", "uniform"):
        dummy = replace(layer, ffn=replace(layer.ffn, dummy_routing=routing))
        config = replace(model.config, layers=(dummy,))
        run = jax.jit(partial(forward, replace(model, config=config), taps=("layers.0.experts",)))
        chosen[routing] = np.asarray(run(params, ids)[1]["layers.0.experts"])
    np.testing.assert_array_equal(chosen["same"], np.tile([0, 1], (len(ids), 1)))
    counts = np.bincount(chosen["uniform"].ravel(), minlength=5)
    assert len(counts) == 5 and counts.min() > 8  # 16 expected


def test_deltas_are_added_in_float32() -> None:
    small, large = jnp.full((2, 3), 2.0**-9, jnp.bfloat16), jnp.ones((2, 3), jnp.bfloat16)
    partials = jnp.stack([large, small]).astype(jnp.float32)
    assert added(partials, small).shape == (3, 2, 3)
    total = Stream(jnp.zeros_like(large), added(partials, small)).total()
    np.testing.assert_array_equal(total, jnp.full((2, 3), 1 + 2.0**-8, jnp.bfloat16))
    assert added(large, small).dtype == jnp.bfloat16
