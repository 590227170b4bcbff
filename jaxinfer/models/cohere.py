"""Command R and R7B (Cohere and Cohere 2): parallel blocks that share a LayerNorm without bias.

Heads rotate by adjacent components; in Cohere 2 only layers with a window rotate. Logits are
multiplied by a constant. Command R+ has a LayerNorm of each head.

Source: ``modeling_cohere`` and ``modeling_cohere2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import pattern_windows, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_SCALE, _PATTERN = 0.0625, 4
_THETA, _THETA_2 = 5e5, 1e4  # Cohere, Cohere 2
_NORMS = NormSources(names=("input_layernorm",))
_NAMES = TensorNames(stacked_norms=True)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias, rotates, theta = hf.flag(config, "attention_bias", False), None, _THETA
    has_norms = hf.flag(config, "use_qk_norm", False)
    if "Cohere2ForCausalLM" in config.get("architectures", ()):
        hf.supported_only(config, "use_qk_norm", False)
        windows = _windows(config)
        rotates, theta = [window is not None for window in windows], _THETA_2
    else:
        windows = windows_by_layer(config, None)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="layers" if has_norms else None,
        windows=windows,
        rotates=rotates,
        theta=theta,
        norms="shared",
        norm="layer_weight",
        parallel=True,
        tied=True,
        logit_scale=hf.positive_float(config, "logit_scale", _SCALE),
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every fourth layer has none."""
    hf.supported_only(config, "use_gated_activation", True)
    hf.supported_only(config, "use_parallel_block", True)
    hf.supported_only(config, "position_embedding_type", "rope_gptj")
    return pattern_windows(config, _PATTERN)


FAMILY = ModelFamily(
    name="cohere",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES, interleaved=True),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
