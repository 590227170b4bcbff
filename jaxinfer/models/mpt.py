"""MPT: ALiBi, LayerNorm without bias, and no biases.

transformers has these alone of the forms that the published code has; others are refused. Where
transformers leaves ``alibi_bias_max`` out (MPT-7B-StoryWriter has 16) the published code counts.

Source: ``modeling_mpt`` of Hugging Face transformers; ``gen_slopes`` of llm-foundry.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.hf_keys import KeysRead, refuse_unread
from jaxinfer.models.names import TensorNames
from jaxinfer.models.plain import plain_config
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.positions import Alibi

_NORMS = NormSources(names=("norm_1", "norm_2"))
_NAMES = TensorNames(
    embed="wte",
    layer="blocks.{}.",
    final_norm="norm_f",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    into=("ffn.up_proj",),
    down="ffn.down_proj",
)
# Keys of the section on attention that have one value.
_ONLY = (
    ("attn_type", "multihead_attention"),
    ("prefix_lm", False),
    ("qk_ln", False),
    ("qk_gn", False),
    ("attn_uses_sequence_id", False),
    ("alibi", True),
    ("rope", False),
    ("sliding_window_size", -1),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, value in (
        ("norm_type", "low_precision_layernorm"),
        ("use_norm_bias", False),
    ):
        if config.get(key) is not None:
            hf.supported_only(config, key, value)
    # Not used by transformers: a checkpoint with biases is refused by their names, and one whose
    # networks are not four times as wide by their shapes.
    for unused in ("no_bias", "expansion_ratio"):
        config.get(unused)
    section = _attention(config)
    width, heads, layers = (
        hf.positive_int(config, key) for key in ("d_model", "n_heads", "n_layers")
    )
    sizes = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": hf.positive_int(config, "max_seq_len", 2048),
    }
    clip, scale = (
        None if section.get(key) is None else hf.positive_float(section, key)
        for key in ("clip_qkv", "softmax_scale")
    )
    most = hf.positive_float(section, "alibi_bias_max", 8.0)
    return plain_config(
        config,
        dtype,
        sizes=sizes,
        num_layers=layers,
        activation="gelu",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        bias=False,
        norm="layer_weight",
        scale=scale,
        attention={"alibi": Alibi(heads, most=most), "clip": clip},
    )


def _attention(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section on attention, whose keys are read or have no effect."""
    config.get("learned_pos_emb")  # positions are learned without ALiBi alone
    given = config.get("attn_config") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"config key 'attn_config' must be an object, got {short(given)}")
    section = KeysRead(given)
    for key, value in _ONLY:
        hf.supported_only(section, key, value)
    for key in ("clip_qkv", "softmax_scale", "alibi_bias_max", "attn_impl"):  # read, or no effect
        section.get(key)
    refuse_unread(section, "'attn_config'")
    return section


FAMILY = ModelFamily(
    name="mpt",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"lm_head\.weight",),
    optional_prefix="transformer.",
)
