"""Llama 2 and 3, SmolLM2 and Mistral: the shared decoder without additions.

Source: ``modeling_llama`` and ``modeling_mistral`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    if "MistralForCausalLM" in config.get("architectures", ()):
        window = sliding_window(config)
    else:
        window = None
        _refuse_window(config)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        windows=windows_by_layer(config, window),
    )


def _refuse_window(config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a window: Llama's layers have none."""
    window, switched_on = config.get("sliding_window"), hf.flag(config, "use_sliding_window", True)
    if window is not None and switched_on:
        raise ConfigError(
            f"config key 'sliding_window' is {window!r}, and LlamaForCausalLM has no windows; set "
            "it to null, or 'architectures' to ['MistralForCausalLM'] if the layers have windows"
        )


FAMILY = ModelFamily(
    name="llama",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
