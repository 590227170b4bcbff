"""The decoder of GPT-J and CodeGen, whose tensors differ.

Source: ``modeling_gptj`` and ``modeling_codegen`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import NormSources, gqa_config
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.rope import RopeConfig

_BASE = 10000.0  # not a key of config.json
NORMS = NormSources(names=("ln_1",))
NAMES = TensorNames(
    embed="wte",
    layer="h.{}.",
    final_norm="ln_f",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    into=("mlp.fc_in",),
    down="mlp.fc_out",
)
_SIZES = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    }
)


def gptj_config(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "rotary", True)
    hf.supported_only(config, "scale_attn_weights", True)
    sizes = {common: hf.positive_int(config, own) for common, own in _SIZES.items()}
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    sizes["intermediate_size"] = hf.positive_int(config, "n_inner", 4 * width)
    head_dim, rotated = width // heads, hf.positive_int(config, "rotary_dim")
    if rotated > head_dim or rotated % 2 or head_dim % 2:
        raise ConfigError(
            f"config key 'rotary_dim' is {rotated}; it must be an even number of the {head_dim} "
            "components of a head"
        )
    return gqa_config(
        hf.with_values(config, sizes),
        dtype,
        mlp_bias=True,
        rope=RopeConfig(head_dim, _BASE, None, None if rotated == head_dim else rotated),
        gated=False,
        activation=hf.activation(config, "activation_function", "gelu_new"),
        norms="shared",
        norm="layer",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        parallel=True,
        head_bias=True,
    )
