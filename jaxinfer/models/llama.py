"""Llama 2 and 3, SmolLM2 and Mistral: the shared decoder without additions.

Source: ``modeling_llama`` and ``modeling_mistral`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, decoder, gqa_config, gqa_tensor_rules
from jaxinfer.nn.decoder_config import DecoderConfig

_MISTRAL_WINDOW = 4096  # what transformers assumes when a Mistral config does not say


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderConfig:
    """Raises ``ConfigError`` naming the key that is missing or asks for something else."""
    bias = hf.flag(config, "attention_bias", False)
    windows = None
    if "MistralForCausalLM" in config.get("architectures", ()):
        window = config.get("sliding_window", _MISTRAL_WINDOW)
        if window is not None:
            window = hf.positive_int(config, "sliding_window", _MISTRAL_WINDOW)
        windows = (window,) * hf.positive_int(config, "num_hidden_layers")
    return gqa_config(config, dtype, qkv_bias=bias, o_bias=bias, qk_norm=False, windows=windows)


FAMILY = ModelFamily(
    name="llama",
    architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    config_from_hf=config_from_hf,
    module=decoder,
    tensor_rules=gqa_tensor_rules,
    kv_spec=lambda config: config.kv_spec,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
