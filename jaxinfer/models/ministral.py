"""Ministral, Ministral 3, the text of Mistral 3: windows; queries may grow with the position.

Source: ``modeling_ministral``, ``modeling_ministral3`` and ``modeling_mistral3`` of Hugging Face
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import query_growth, with_rope
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults, of which the second one is Ministral 3's
_WINDOW = 4096
_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    is_third = config.get("model_type") == "ministral3"
    is_third = is_third or "Ministral3ForCausalLM" in config.get("architectures", ())
    window = sliding_window(config, None if is_third else _WINDOW)
    own, growth = query_growth(with_rope(config, _ROPE) if is_third else config)
    return gqa_config(
        own,
        dtype,
        windows=windows_by_layer(config, window),
        attention={"growth": growth},
    )


FAMILY = ModelFamily(
    name="ministral",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    ),
    optional_prefix=("model.language_model.", "language_model."),  # of Mistral 3
)
