"""StarCoder 1 (GPT-BigCode): GPT-2 with one KV head, or with one of each query head.

Source: ``modeling_gpt_bigcode`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.plain import plain_config
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec

_NORMS = NormSources(names=("ln_1", "ln_2"))
_NAMES = TensorNames(
    embed="wte",
    positions="wpe",
    layer="h.{}.",
    final_norm="ln_f",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    into=("mlp.c_fc",),
    down="mlp.c_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "add_cross_attention", False)
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        hf.flag(config, key, True)  # softmax is always in float32
    width, heads, layers, positions = (
        hf.positive_int(config, key) for key in ("n_embd", "n_head", "n_layer", "n_positions")
    )
    one_head = hf.flag(config, "multi_query", True)
    hf.supported_only(config, "num_key_value_heads", 1 if one_head else heads)
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if one_head else heads,
        "intermediate_size": hf.positive_int(config, "n_inner", 4 * width),
        "max_position_embeddings": positions,
    }
    return plain_config(
        config,
        dtype,
        sizes=sizes,
        num_layers=layers,
        activation=hf.activation(config, "activation_function", "gelu_pytorch_tanh"),
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        scale=None if hf.flag(config, "scale_attn_weights", True) else 1.0,
        num_positions=positions,
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; with several KV heads the rows of a head are together."""
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    names = _NAMES._replace(packed=mixer.num_kv_heads > 1)
    return gqa_param_specs(config, norms=_NORMS, names=names)


FAMILY = ModelFamily(
    name="gpt_bigcode",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
