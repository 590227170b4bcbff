"""Muse Glimmer's text decoder: windows, whose layers alone rotate, gates on heads, norms around
blocks, and embeddings, queries and keys that are normalised without weights.

Source: ``modeling_muse_glimmer`` of Hugging Face transformers. Tensors for images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import stack_plus_one
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _WINDOW, _EVERY, _CAP = 128, 2048, 4, 20.0
_QUERY_FACTOR, _LOGIT_FACTOR, _POST_EPS = 3.87, 0.19611613513818404, 1e-8
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NORMS = NormSources(  # the final norm multiplies by its weight alone
    names=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    several=stack_plus_one,
)
_NAMES = TensorNames(gate="self_attn.gate_proj")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    config.get("hidden_act")  # not the one in use
    hf.supported_only(config, "attention_bias", False)  # which gates would not have
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    is_full = [(num_layers - 1 - i) % _EVERY == 0 for i in range(num_layers)]
    kinds = [_FULL if full else _SLIDING for full in is_full]
    own = hf.with_defaults(config, {"layer_types": kinds})
    factor = hf.positive_float(config, "qk_scale_factor", _QUERY_FACTOR)
    rope = rope_config(config, head_dim)
    return gqa_config(
        own,
        dtype,
        qk_norm="plain",
        head_dim=head_dim,
        scale=factor * head_dim**-0.5,
        rope=rope,
        windows=windows_by_layer(own, sliding_window(config, _WINDOW)),
        rotates=_rotates(config, rope.theta, is_full),
        activation=hf.activation(config, "hidden_activation", "silu"),
        norms="both",
        post_norm_eps=hf.positive_float(config, "post_norm_eps", _POST_EPS),
        norm_dtype=jnp.dtype(jnp.float32),
        embed_norm="plain",
        attention={"gate": True},
        logit_scale=hf.positive_float(config, "output_multiplier", _LOGIT_FACTOR),
        logit_cap=hf.positive_float(config, "final_logit_softcapping", _CAP),
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


FAMILY = ModelFamily(
    name="muse_glimmer",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.vision_(tower|adapter|projection)\..*",
        r"model\.layers\.\d+\.self_attn\.[qk]_norm\.weight",  # of GGUF files, whose reader has them
    ),
    optional_prefix="model.language_model.",
)
