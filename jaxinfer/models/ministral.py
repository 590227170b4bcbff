"""Ministral, Ministral 3, the text of Mistral 3: windows; queries may grow with the position.

Source: ``modeling_ministral``, ``modeling_ministral3`` and ``modeling_mistral3`` of Hugging Face
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    gqa_config,
    gqa_param_specs,
    sliding_window,
    windows_by_layer,
)
from jaxinfer.models.hf_rope import SECTIONS, with_rope
from jaxinfer.nn.decoder_config import DecoderSpec, QueryGrowth

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"
# transformers' defaults, of which the second one is Ministral 3's
_WINDOW = 4096
_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        _ORIGINAL: 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _BETA: 0.1,
    }
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    is_third = config.get("model_type") == "ministral3"
    is_third = is_third or "Ministral3ForCausalLM" in config.get("architectures", ())
    window = sliding_window(config, None if is_third else _WINDOW)
    own, growth = _growth(with_rope(config, _ROPE) if is_third else config)
    return gqa_config(
        own,
        dtype,
        qkv_bias=False,
        o_bias=False,
        qk_norm=None,
        windows=windows_by_layer(config, window),
        attention={"growth": growth},
    )


def _growth(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], QueryGrowth | None]:
    """The config without the key of the growth of queries in its rope section, and the growth."""
    found = {place: config.get(place) for place in SECTIONS}
    sections = {k: dict(s) for k, s in found.items() if isinstance(s, Mapping)}
    section = next((s for s in sections.values() if s.get(_BETA) is not None), None)
    if section is None:
        return config, None
    growth = QueryGrowth(hf.positive_float(section, _BETA), hf.positive_int(section, _ORIGINAL))
    for one in sections.values():
        one.pop(_BETA, None)
    return hf.with_values(config, sections), growth


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
