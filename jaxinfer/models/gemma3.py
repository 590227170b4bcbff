"""Gemma 3 (text): windows in five of six layers, norms before and after each block.

Source: ``modeling_gemma3`` of Hugging Face transformers. Norms multiply by 1 + w in float32, so
their weights are stored as 1 + w in float32. Embeddings are multiplied by the square root of the
width, rounded to the dtype. Layers with a window have another rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gemma_parts import AROUND_BLOCKS
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ropes_by_kind
from jaxinfer.models.layer_kinds import pattern_windows
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _SCALAR, _PATTERN = 256, 256, 6
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4

_LOCAL_KEY = "rope_local_base_freq"


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    capped = config.get("final_logit_softcapping") is not None
    hf.supported_only(config, "use_bidirectional_attention", False)
    bias = hf.flag(config, "attention_bias", False)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    rope, local_rope = ropes_by_kind(
        config, head_dim, theta=_GLOBAL_THETA, local_theta=_LOCAL_THETA, local_key=_LOCAL_KEY
    )
    decoder = gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        head_dim=head_dim,
        windows=pattern_windows(config, _PATTERN),
        rope=rope,
        local_rope=local_rope,
        activation=hf.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        scale=hf.positive_float(config, "query_pre_attn_scalar", _SCALAR) ** -0.5,
        norms="both",
        norm_dtype=jnp.dtype(jnp.float32),
        logit_cap=hf.positive_float(config, "final_logit_softcapping") if capped else None,
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
    )
    # that of published files, 131,072, is already the one with the scaling by 8
    length = hf.positive_int(config, "max_position_embeddings")
    return replace(decoder, lengths=(length, length))


FAMILY = ModelFamily(
    name="gemma3",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=AROUND_BLOCKS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
