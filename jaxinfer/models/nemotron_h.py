"""Nemotron-H: layers of one block, which is Mamba-2, attention without rope, or a network.

The networks of Nemotron 3 have experts without gates, of squared ReLUs. In Nemotron-H Puzzle each
layer may have sizes of its own, which ``block_configs`` holds.

Source: ``modeling_nemotron_h`` of Hugging Face transformers; of Puzzle ``nemotron_h.py`` of vLLM.
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
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config, grouped_routing
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.mamba import MAMBA2_KEYS, MambaKeys, mamba2_config, mamba2_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.absent import NoMixer, NoNetwork
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    FeedForwardConfig,
    LayerSpec,
)
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config
from pallas_kernels.experts.stack import RELU2

_NAMES = TensorNames(
    embed="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    into=("mixer.up_proj",),
    down="mixer.down_proj",
)
_KEYS = MAMBA2_KEYS._replace(
    sizes=MambaKeys(state="ssm_state_size"), heads="mamba_num_heads", head_dim="mamba_head_dim"
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
_BLOCKS = "block_configs"
_BLOCK_KEYS = MappingProxyType(  # those that a block of Puzzle has in place of the model's
    {
        _MAMBA: ("ssm_state_size",),
        _FULL: ("sliding_window",),
        _NETWORK: ("intermediate_size",),
        _EXPERTS: (
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
            *("moe_shared_expert_intermediate_size", "moe_latent_size", "topk_group"),
            *("norm_topk_prob", "routed_scaling_factor"),
        ),
    }
)
# of layers with experts, if there are none; how a shared network and experts overlap; prediction
_OF_EXPERTS = (
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor", "num_local_experts"),
)
_UNUSED = (
    *("moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("mtp_block_configs", "blockwise_members"),
)
_TENSORS = ExpertTensors(
    router="mixer.gate",
    up="mixer.experts.{}.up_proj",
    down="mixer.experts.{}.down_proj",
    choice_bias="mixer.gate.e_score_correction_bias",
    shared="mixer.shared_experts.",
    latents=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)
_EXPERT_DEFAULTS = MappingProxyType(  # transformers'
    {
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
)
# transformers' defaults
_HEAD_DIM, _LEAST_STEP, _EPS, _GROUPS, _STATE, _CHUNK_HEAD = 128, 0.001, 1e-5, 8, 128, 64


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    older = {key: config.get(name) for name, key in _OLDER.items()}
    config = hf.with_values(config, {key: v for key, v in older.items() if v is not None})
    hf.supported_only(config, "mamba_hidden_act", "silu", "swish")
    for unused in ("tie_word_embeddings", "attention_bias", "sliding_window"):
        config.get(unused)  # as in transformers
    for unused in (*_UNUSED, "num_logits_to_keep", "residual_in_fp32", "mamba_proj_bias"):
        config.get(unused)
    for unused in ("mamba_expand", "rescale_prenorm_residual", "rms_norm_eps", "norm_eps"):
        config.get(unused)
    for unused in ("rope_theta", "rope_parameters", "partial_rotary_factor", "time_step_limit"):
        config.get(unused)  # in some files, but nothing rotates
    kinds = _layer_kinds(config)
    if config.get(_BLOCKS) is None:
        alike = {kind: _layer(config, kind) for kind in {_MAMBA, _FULL, _NETWORK, *kinds}}
        layers = [alike[kind] for kind in kinds]
    else:
        layers = _own_layers(config, kinds)
    for unused in () if _EXPERTS in kinds else _OF_EXPERTS:
        config.get(unused)
    length = hf.positive_int(config, "max_position_embeddings")
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hf.positive_int(config, "hidden_size"),
        layers=tuple(layers),
        lengths=(length, length),
        norm="rms",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", _EPS),
        tie_word_embeddings=False,
        dtype=dtype,
    )


def _layer(config: Mapping[str, Any], kind: str, window: int | None = None) -> LayerSpec:
    """The block of a layer, with the norm before it."""
    if kind == _MAMBA:
        return LayerSpec(_mamba(config), NoNetwork(), "shared")
    if kind == _FULL:
        return LayerSpec(_attention(config, window), NoNetwork(), "shared")
    network = _network(config) if kind == _NETWORK else _experts(config)
    return LayerSpec(NoMixer(), network, "shared")


def _own_layers(config: Mapping[str, Any], kinds: list[str]) -> list[LayerSpec]:
    """The layers of Puzzle: what a block of ``block_configs`` has wins over the model's keys."""
    for keys in _BLOCK_KEYS.values():
        for unused in keys:
            config.get(unused)  # where every block has its own
    found: list[LayerSpec] = []
    for i, (block, kind) in enumerate(zip(config[_BLOCKS], kinds, strict=True)):
        given = {key: value for key, value in block.items() if value is not None}
        del given["block_type"]
        if unknown := [key for key in given if key not in _BLOCK_KEYS[kind]]:
            raise ConfigError(
                f"config key {_BLOCKS!r} has {short(unknown[0])} for layer {i}, which is not "
                f"supported; blocks of this kind have {', '.join(_BLOCK_KEYS[kind])}"
            )
        own = hf.with_values(config, given)
        window = None
        if kind == _FULL and own.get("sliding_window") is not None:
            window = hf.positive_int(own, "sliding_window")
        found.append(_layer(own, kind, window))
    return found


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, by blocks of their own, a list, or a pattern with a letter each."""
    given = config.get("layers_block_type") or config.get("layer_types")
    pattern, blocks = config.get("hybrid_override_pattern"), config.get(_BLOCKS)
    if blocks is not None:
        is_list = isinstance(blocks, list) and all(isinstance(one, Mapping) for one in blocks)
        given = [one.get("block_type") for one in blocks] if is_list else [None]
    elif given is None and isinstance(pattern, str):
        given = [_OF_PATTERN.get(letter, letter) for letter in pattern]
    if not isinstance(given, list | tuple) or not given:
        raise ConfigError(
            "config keys 'layers_block_type' and 'hybrid_override_pattern' are missing; one of "
            "them must have the kind of each layer"
        )
    kinds = [_OF_OLDER.get(kind, kind) if isinstance(kind, str) else "" for kind in given]
    unknown = [kind for kind in kinds if kind not in _OF_PATTERN.values()]
    num_layers = hf.positive_int(config, "num_hidden_layers", len(kinds))
    if unknown or num_layers != len(kinds):
        key = "layers_block_type" if blocks is None else _BLOCKS
        raise ConfigError(
            f"config key {key!r} must hold one of {', '.join(_OF_PATTERN.values())} "
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


def _attention(config: Mapping[str, Any], window: int | None) -> AttentionConfig:
    """Attention without rope and without biases."""
    heads, kv_heads = hf.head_counts(config, 8)
    head_dim = config.get("attention_head_dim") and hf.positive_int(config, "attention_head_dim")
    head_dim = hf.positive_int(config, "head_dim", head_dim or _HEAD_DIM)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
    )


def _network(config: Mapping[str, Any]) -> FeedForwardConfig:
    """A network without a gate, of squared ReLUs."""
    return FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation=hf.activation(config, "mlp_hidden_act", "relu2"),
        gated=False,
        bias=hf.flag(config, "mlp_bias", False),
    )


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Experts chosen as in DeepSeek-V3, and a network of all tokens; none has gates."""
    hf.supported_only(config, "mlp_hidden_act", "relu2")
    bias = hf.flag(config, "mlp_bias", False)  # experts have none
    # of another number vLLM multiplies the width by it, transformers does not
    hf.supported_only(config, "n_shared_experts", 1)
    own = hf.with_defaults(config, _EXPERT_DEFAULTS)
    width = hf.positive_int(config, "moe_shared_expert_intermediate_size", 7688)
    latent = None
    if config.get("moe_latent_size") is not None:
        latent = hf.positive_int(config, "moe_latent_size")
        hf.supported_only(config, "mlp_bias", False)
    return experts_config(
        own,
        count="n_routed_experts",
        width="moe_intermediate_size",
        routing=grouped_routing(own, "sigmoid"),
        choice_bias=True,
        activation=RELU2,
        shared=FeedForwardConfig(width=width, activation="relu2", gated=False, bias=bias),
        latent=latent,
    )


FAMILY = ModelFamily(
    name="nemotron_h",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("norm",)),
        names=_NAMES,
        experts=partial(expert_specs, names=_TENSORS),
        mixers=partial(mamba2_specs, name="mixer."),
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
    other_names=((r"^model\.", "backbone."),),  # of Puzzle
)
