"""Config keys that Muse Glimmer and Muse Spark have in common: windows, whose layers alone rotate,
gates on heads, and embeddings, queries and keys that are normalised without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import gqa_config
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_WINDOW, _EVERY, _CAP, POST_EPS = 2048, 4, 20.0, 1e-8
_FULL, _SLIDING = "full_attention", "sliding_attention"
NAMES = TensorNames(gate="self_attn.gate_proj")


def muse_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    head_dim: int,
    query_factor: float,
    logit_factor: float,
    theta: float,
    attention: Mapping[str, Any],
    **more: Any,
) -> DecoderSpec:
    """A decoder of a config.json; the numbers are defaults, ``attention`` are further fields of
    attention and ``more`` further arguments of ``gqa_config``. Raises ``ConfigError`` for a missing
    or unsupported key.
    """
    hf.supported_only(config, "attention_bias", False)  # which gates would not have
    head_dim = hf.positive_int(config, "head_dim", head_dim)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    is_full = [(num_layers - 1 - i) % _EVERY == 0 for i in range(num_layers)]
    kinds = [_FULL if full else _SLIDING for full in is_full]
    own = hf.with_defaults(config, {"layer_types": kinds})
    factor = hf.positive_float(config, "qk_scale_factor", query_factor)
    rope = rope_config(config, head_dim, theta=theta)
    return gqa_config(
        own,
        dtype,
        qk_norm="plain",
        head_dim=head_dim,
        scale=factor * head_dim**-0.5,
        rope=rope,
        windows=windows_by_layer(own, sliding_window(config, _WINDOW)),
        rotates=_rotates(config, rope.theta, is_full),
        norm_dtype=jnp.dtype(jnp.float32),
        embed_norm="plain",
        attention={"gate": True, **attention},
        logit_scale=hf.positive_float(config, "output_multiplier", logit_factor),
        logit_cap=hf.positive_float(config, "final_logit_softcapping", _CAP),
        **more,
    )


def _rotates(config: Mapping[str, Any], theta: float, is_full: list[bool]) -> list[bool]:
    """Which layers rotate: those whose base is not 0; all others have the same one."""
    given = config.get("layer_rope_theta")
    if given is None:
        return [not full for full in is_full]
    fits = isinstance(given, list | tuple) and len(given) == len(is_full)
    if not fits or not all(type(one) in (int, float) and one in (0, theta) for one in given):
        raise ConfigError(
            f"config key 'layer_rope_theta' must hold 0 or {theta:g}, the base of all layers that "
            f"rotate, for each of the {len(is_full)} layers, got {short(given)}"
        )
    return [one != 0 for one in given]
