"""Phi-3, Phi-3.5 and Phi-4: the shared decoder with fused tensors; heads may rotate in part.

Source: ``modeling_phi3`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import SECTIONS
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_POSITIONS = "max_position_embeddings"
_ORIGINAL, _DEFAULT = "original_max_position_embeddings", 4096  # transformers' default
_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), into=("mlp.gate_up_proj",))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "attention_bias", False)
    hf.supported_only(config, "full_attn_mod", 1)
    window, longest = sliding_window(config, None), hf.positive_int(config, _POSITIONS)
    if window is not None and window >= longest:  # 262,144 in files with 131,072 positions
        window = None
    return gqa_config(
        _with_original(config),
        dtype,
        windows=windows_by_layer(config, window),
        partial_rotary=1.0,
    )


def _with_original(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the length before scaling, if it is nowhere else."""
    sections = (config.get(place) for place in SECTIONS)
    if any(isinstance(one, Mapping) and one.get(_ORIGINAL) is not None for one in sections):
        return config
    return hf.with_defaults(config, {_ORIGINAL: _DEFAULT})


FAMILY = ModelFamily(
    name="phi3",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES),
    # the second are the encoders of Phi-4 multimodal
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.embed_tokens_extend\..*"),
)
