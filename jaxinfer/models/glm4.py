"""GLM-4 (0414): norms before and after blocks; half of each head rotates, by adjacent components.

Source: ``modeling_glm4`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_HEAD_DIM, _PARTIAL_ROTARY = 128, 0.5  # transformers' defaults
_NAMES = TensorNames(into=("mlp.gate_up_proj",))
_NORMS = NormSources(
    names=(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    head_dim = _HEAD_DIM
    if config.get("model_type") in ("glm4v_text", "glm_ocr_text"):  # GLM-4.1V derives it
        head_dim = hf.positive_int(config, "hidden_size") // hf.positive_int(
            config, "num_attention_heads"
        )
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", True),
        head_dim=hf.positive_int(config, "head_dim", head_dim),
        partial_rotary=_PARTIAL_ROTARY,
        norms="both",
    )


FAMILY = ModelFamily(
    name="glm4",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES, interleaved=True),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
