"""Nemotron-H: layers of one block, which is Mamba-2, attention without rope, or a network.

Source: ``modeling_nemotron_h`` of Hugging Face transformers. Layers with experts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.mamba import Mamba2Keys, mamba2_config, mamba2_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.absent import NoMixer, NoNetwork
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    LayerSpec,
)
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config

_NAMES = TensorNames(
    embed="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    into=("mixer.up_proj",),
    down="mixer.down_proj",
)
_KEYS = Mamba2Keys(
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    state="ssm_state_size",
    groups="n_groups",
    taps="conv_kernel",
    expand="expand",
    conv_bias="use_conv_bias",
    bias="use_bias",
    norm_eps="layer_norm_epsilon",
    chunk="chunk_size",
)
# names of these keys in older files
_OLDER = MappingProxyType(
    {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_min": "time_step_min",
        "mamba_chunk_size": "chunk_size",
    }
)
_MAMBA, _FULL, _NETWORK, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_OF_PATTERN = MappingProxyType({"M": _MAMBA, "*": _FULL, "-": _NETWORK, "E": _EXPERTS})
_OF_OLDER = MappingProxyType({"mamba": _MAMBA, "attention": _FULL})
# transformers' defaults
_HEAD_DIM, _LEAST_STEP, _EPS, _GROUPS, _STATE, _CHUNK_HEAD = 128, 0.001, 1e-5, 8, 128, 64


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    older = {key: config.get(name) for name, key in _OLDER.items()}
    config = hf.with_values(config, {key: v for key, v in older.items() if v is not None})
    hf.supported_only(config, "mamba_hidden_act", "silu", "swish")
    hf.supported_only(config, "attention_bias", False)
    hf.supported_only(config, "tie_word_embeddings", False)
    for unused in (*_KEYS_OF_EXPERTS, "num_logits_to_keep", "residual_in_fp32", "mamba_proj_bias"):
        config.get(unused)
    for unused in ("mamba_expand", "rescale_prenorm_residual", "rms_norm_eps", "norm_eps"):
        config.get(unused)
    for unused in ("rope_theta", "rope_parameters", "partial_rotary_factor", "time_step_limit"):
        config.get(unused)  # in some files, but nothing rotates
    blocks = {
        _MAMBA: LayerSpec(_mamba(config), NoNetwork(), "shared"),
        _FULL: LayerSpec(_attention(config), NoNetwork(), "shared"),
        _NETWORK: LayerSpec(NoMixer(), _network(config), "shared"),
    }
    length = hf.positive_int(config, "max_position_embeddings")
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hf.positive_int(config, "hidden_size"),
        layers=tuple(blocks[kind] for kind in _layer_kinds(config)),
        lengths=(length, length),
        norm="rms",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", _EPS),
        tie_word_embeddings=False,
        dtype=dtype,
    )


# of layers with experts, of which a supported file has none
_KEYS_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap"),
    *("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor", "num_local_experts"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "moe_shared_expert_overlap"),
)


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, by a list or by a pattern with a letter for each."""
    given = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if given is None and isinstance(pattern, str):
        given = [_OF_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(
            "config keys 'layers_block_type' and 'hybrid_override_pattern' are missing; one of "
            "them must have the kind of each layer"
        )
    kinds = [_OF_OLDER.get(kind, kind) if isinstance(kind, str) else "" for kind in given]
    if _EXPERTS in kinds:
        raise ConfigError(
            "config key 'layers_block_type' has layers with experts ('moe'), which have no gate "
            "and are not supported in NemotronHForCausalLM; use a model without them"
        )
    unknown = [kind for kind in kinds if kind not in _OF_PATTERN.values()]
    num_layers = hf.positive_int(config, "num_hidden_layers", len(kinds))
    if unknown or num_layers != len(kinds):
        raise ConfigError(
            f"config key 'layers_block_type' must hold one of {', '.join(_OF_PATTERN.values())} "
            f"for each of the {num_layers} layers, got {short(given)}"
        )
    return kinds


def _mamba(config: Mapping[str, Any]) -> Mamba2Config:
    """The mixer; in transformers steps have a lower limit and no upper one."""
    heads = hf.positive_int(config, "mamba_num_heads", 128)
    head_dim = hf.positive_int(config, "mamba_head_dim", _CHUNK_HEAD)
    least = hf.positive_float(config, "time_step_min", _LEAST_STEP)
    return mamba2_config(
        hf.with_values(config, {"mamba_head_dim": head_dim, "time_step_limit": None}),
        _KEYS,
        inner=heads * head_dim,
        state=_STATE,
        groups=_GROUPS,
        step_limit=(least, float("inf")),
    )


def _attention(config: Mapping[str, Any]) -> AttentionConfig:
    """Attention without rope and without biases."""
    heads = hf.positive_int(config, "num_attention_heads")
    kv_heads = hf.positive_int(config, "num_key_value_heads", 8)
    head_dim = config.get("attention_head_dim") and hf.positive_int(config, "attention_head_dim")
    head_dim = hf.positive_int(config, "head_dim", head_dim or _HEAD_DIM)
    if heads % kv_heads:
        raise ConfigError(
            f"config key 'num_attention_heads' {heads} is not a multiple of "
            f"'num_key_value_heads' {kv_heads}"
        )
    return AttentionConfig(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )


def _network(config: Mapping[str, Any]) -> FeedForwardConfig:
    """A network without a gate, of squared ReLUs."""
    return FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation=hf.activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=hf.flag(config, "mlp_bias", False),
    )


FAMILY = ModelFamily(
    name="nemotron_h",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("norm",)),
        names=_NAMES,
        mixers=partial(mamba2_specs, name="mixer."),
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
