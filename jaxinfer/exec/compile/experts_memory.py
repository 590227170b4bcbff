"""A bound on the workspace of a layer's experts, by the implementation that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.models.base import Model, abstract_params
from jaxinfer.nn.decoder_config import ExpertsConfig
from jaxinfer.nn.weight import stored
from pallas_kernels.experts.api import OP, ExpertsArgs
from pallas_kernels.experts.launch import MOST_ROWS
from pallas_kernels.experts.tiles import max_tiles
from pallas_kernels.experts.xla import rows_of_tile
from pallas_kernels.harness.registry import select


def experts_bytes(
    model: Model, num_tokens: int, *, platform: str, pinned: str | None = None
) -> int:
    """A bound on the bytes that the experts of one layer need for so many tokens, at most of all
    layers; 0 without experts. ``pinned`` is the implementation that the user has chosen; whether it
    can run is found when a step is traced.
    """
    params = abstract_params(model)
    # by what the choice of an implementation depends on: most layers are alike
    layers: dict[str, tuple[ExpertsConfig, Mapping[str, Any]]] = {}
    for i, layer in enumerate(model.config.layers):
        if isinstance(layer.ffn, ExpertsConfig):
            own = params[f"layers_{i}"]
            layers[f"{layer.ffn} {own['gate_up']} {own['down']}"] = layer.ffn, own
    x = jax.ShapeDtypeStruct((num_tokens, model.config.hidden_size), model.config.dtype)
    each = (
        _bytes(ffn, x, pinned or _chosen(ffn, own, x, platform)) for ffn, own in layers.values()
    )
    return max(each, default=0)


def _chosen(
    ffn: ExpertsConfig,
    own: Mapping[str, Any],  # the abstract parameters of the layer
    x: jax.ShapeDtypeStruct,  # [T, D]
    platform: str,
) -> str:
    """The name of the implementation for these tokens."""
    of, pairs = jax.ShapeDtypeStruct, (x.shape[0], ffn.routing.chosen)
    args: dict[str, Any] = {
        "x": x,
        "choices": of(pairs, jnp.int32),
        "weights": of(pairs, jnp.float32),
        "gate_up": stored(own["gate_up"]).matrix,
        "down": stored(own["down"]).matrix,
        "gate_up_bias": own.get("gate_up_bias"),
        "down_bias": own.get("down_bias"),
    }
    call = ExpertsArgs(**args, activation=ffn.activation, split=True)
    return select(OP, platform, (call,), {}).name


def _bytes(ffn: ExpertsConfig, x: jax.ShapeDtypeStruct, implementation: str) -> int:
    (num_tokens, width), itemsize = x.shape, x.dtype.itemsize
    pairs = num_tokens * ffn.routing.chosen  # of a token and an expert
    if implementation == "xla":
        rows = rows_of_tile(num_tokens, ffn.routing.chosen, ffn.count)
        # in float32: outputs of all tiles, and of all pairs; of one tile inputs, gates, ups, hidden
        # values and outputs; and the matrices of its expert
        outputs = (max_tiles(pairs, ffn.count, rows) * rows + pairs) * width
        of_tile = rows * (3 * ffn.width + 2 * width) + 3 * ffn.width * width
        return 4 * (outputs + of_tile)
    # inputs, gates, ups, hidden values, and outputs in float32
    elements = pairs * (3 * ffn.width + (1 + 4 // itemsize) * width)
    if implementation == "hopper":  # rows that fill up tiles: inputs or outputs, hidden values
        elements += ffn.count * MOST_ROWS * (ffn.width + width)
    return elements * itemsize
