"""The workspace of mixers, for the memory plan of an engine; needs no Flax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from pallas_kernels.delta_prefill.api import OP, DeltaPrefillArgs
from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import workspace_of


def delta_bytes(
    config: DeltaConfig,
    params: Mapping[str, Any],
    x: jax.ShapeDtypeStruct,  # [T, D]
    num_prompts: int,
    platform: str,
    pins: Pins,
) -> int:
    """See ``BlockSpec.workspace``: that of prompts. Before it, their convolved queries, keys and
    values in float32 and in the dtype of ``x``; a decode row needs less than its matrices.
    """
    del params
    if not num_prompts:
        return 0
    of, tokens, float32 = jax.ShapeDtypeStruct, x.shape[0], jnp.dtype(jnp.float32)
    rows, gates = of((num_prompts,), jnp.int32), of((tokens, config.num_v_heads), float32)
    keys = of((tokens, config.num_k_heads, config.k_dim), x.dtype)
    abstract: dict[str, Any] = {
        "q": keys,
        "k": keys,
        "v": of((tokens, config.num_v_heads, config.v_dim), x.dtype),
        "log_decay": gates,
        "beta": gates,
        "states": of((1, config.num_v_heads, config.k_dim, config.v_dim), float32),
        "query_start_loc": of((num_prompts + 1,), jnp.int32),
        "begins": rows,
        "reads": rows,
        "writes": rows,
    }
    inputs = tokens * sum(config.channels.widths) * (float32.itemsize + 2 * x.dtype.itemsize)
    args = DeltaPrefillArgs(**abstract)
    return inputs + workspace_of(OP, platform, args, pins.of(OP.name))
