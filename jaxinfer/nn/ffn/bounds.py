"""The workspace of a mixture of experts, for the memory plan of an engine; needs no Flax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.decoder_config import ExpertsConfig
from jaxinfer.nn.weight import stored
from pallas_kernels.experts.api import OP, ExpertsArgs
from pallas_kernels.harness.registry import workspace_of


def experts_bytes(config: ExpertsConfig, params: Mapping[str, Any], step: StepShape) -> int:
    """See ``BlockSpec.workspace``: the bound of the implementation that runs these tokens."""
    x, around = step.x, 0  # the latent, and the experts' sum
    if config.latent is not None:
        around = 2 * x.shape[0] * config.latent * x.dtype.itemsize
        x = jax.ShapeDtypeStruct((x.shape[0], config.latent), x.dtype)
    of, pairs = jax.ShapeDtypeStruct, (x.shape[0], config.routing.chosen)
    if config.norms is not None:  # a choice has a row of its own, in float32 for its norm, too
        pairs = (pairs[0] * pairs[1], 1)
        around += 2 * pairs[0] * x.shape[1] * (x.dtype.itemsize + 4)
        x = of((pairs[0], x.shape[1]), x.dtype)
    abstract: dict[str, Any] = {
        "x": x,
        "choices": of(pairs, jnp.int32),
        "weights": of(pairs, jnp.float32),
        "gate_up": stored(params["gate_up"]).matrix,
        "down": stored(params["down"]).matrix,
        "gate_up_bias": params.get("gate_up_bias"),
        "down_bias": params.get("down_bias"),
    }
    args = ExpertsArgs(**abstract, activation=config.activation, split=True)
    return around + workspace_of(OP, step.platform, args, step.pins.of(OP.name))
