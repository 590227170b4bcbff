"""GLM-5.3-Flash: the delta rule with a decay of each channel or latent attention to pools of tokens
that an indexer has chosen, without rope, and residual streams that each block mixes.

Source: ``modeling_glm5_next`` of Hugging Face transformers, and the keys of published files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import channel_delta_specs
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.hybrid import DELTA
from jaxinfer.models.indexed_latent import FULL, indexed_param_specs, indexer_kinds
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, latent_decoder
from jaxinfer.models.params import ParamSpec, as_is, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.models.streams import stream_specs
from jaxinfer.nn.decoder_config import (
    DecoderSpec,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
)
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.mixers.indexed_latent_spec import IndexerConfig
from jaxinfer.nn.mixers.pooled_latent_spec import PooledLatentConfig
from jaxinfer.nn.residual_spec import MixedResidual
from pallas_kernels.experts.stack import Activation

# names of a layer with attention: of transformers, of its older configs and of published files
_SPARSE = ("indexed_attention", "full_attention", "deepseek_sparse_attention")
_SECTION = "linear_attn_config"
# the keys of that section, those of the config itself that transformers writes, and their defaults
_SIZES = (
    ("num_heads", "linear_num_heads", 64),
    ("head_dim", "linear_head_dim", 128),
    ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
)
_FLOOR = -5.0
_LISTS = ("kda_layers", "full_attn_layers")  # of layers, counted from 0
_FIXED: tuple[tuple[str, Any], ...] = (
    *(("hidden_act", "silu"), ("qk_rope_head_dim", 0), ("mla_use_nope", True), ("mhc", True)),
    *(("index_kpool_compress", True), ("index_kpool_always_select_tail", True)),
    *(("moe_router_dtype", "float32"), ("moe_layer_freq", 1)),
    *(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
)
_UNUSED = (  # of ropes that there are none of, and of layers for prediction
    *("head_dim", "indexer_rope_interleave", "index_share_for_mtp_iteration"),
    *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
)
_DEFAULTS = MappingProxyType(  # transformers'
    {
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "v_head_dim": 256},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 288, "num_experts_per_tok": 8},
        "routed_scaling_factor": 2.5,
    }
)
_MAGNITUDE = 2.0  # of the weights of blocks' outputs
_BLOCKS = MappingProxyType({"mixer_residual": "hc_attn_", "ffn_residual": "hc_ffn_"})


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in _FIXED:
        hf.supported_only(config, key, only)
    for key in _UNUSED:
        config.get(key)
    own = hf.with_defaults(config, _DEFAULTS)
    networks = _networks(own)
    mixers = _mixers(own, len(networks))
    layers = tuple([LayerSpec(*pair) for pair in zip(mixers, networks, strict=True)])
    length = hf.positive_int(config, "max_position_embeddings")
    decoder = latent_decoder(config, dtype, layers, (length, length))
    residual = MixedResidual(
        num_streams=hf.positive_int(config, "hc_mult", 4),
        magnitude=_MAGNITUDE,
        eps=hf.positive_float(config, "hc_eps", 1e-6),
        norm_eps=decoder.norm_eps,
        rounds=hf.positive_int(config, "hc_sinkhorn_iters", 20),
        mean=True,
    )
    return replace(decoder, residual=residual)


def _networks(config: Mapping[str, Any]) -> list[FeedForwardSpec]:
    """The network of each layer, whose gates and ups have a limit."""
    activation = Activation(limit=hf.positive_float(config, "swiglu_limit", 10.0))
    experts = biased_experts(config)
    shared = experts.shared and replace(experts.shared, swiglu=activation)
    experts = replace(experts, activation=activation, shared=shared)
    return [
        replace(own, swiglu=activation) if isinstance(own, FeedForwardConfig) else own
        for own in networks_by_layer(config, experts, first=3)
    ]


def _mixers(config: Mapping[str, Any], count: int) -> list[MixerSpec]:
    """The mixer of each layer; without kinds every fourth layer has attention, as transformers
    does it.
    """
    kinds = hf.layer_kinds(config, "layer_types", count, (DELTA, *_SPARSE))
    kinds = kinds or [DELTA if i % 4 != 3 else _SPARSE[0] for i in range(count)]
    section = _section(config, kinds)
    chosen_by = indexer_kinds(config, count)
    attention, delta = _attention(config), _delta(config, section)
    mixers: list[MixerSpec] = []
    last: int | None = None  # the layer before, if it has an indexer
    for i, (kind, by) in enumerate(zip(kinds, chosen_by, strict=True)):
        if kind == DELTA:
            mixers.append(delta)
            last = None
        elif by == FULL:
            mixers.append(attention)
            last = i
        elif last is None:
            raise ConfigError(
                f"config key 'indexer_types' lets layer {i} attend to the tokens that the layer "
                "before it has chosen, which has no indexer; correct it"
            )
        else:
            mixers.append(replace(attention, indexer=None, follows=last))
            last = None
    return mixers


def _attention(config: Mapping[str, Any]) -> PooledLatentConfig:
    """The attention of a layer with an indexer."""
    heads, nope = (
        hf.positive_int(config, key) for key in ("num_attention_heads", "qk_nope_head_dim")
    )
    # keys that transformers derives
    hf.supported_only(config, "num_key_value_heads", heads)
    hf.supported_only(config, "qk_head_dim", nope)
    top_k, pool = (
        hf.positive_int(config, key, default)
        for key, default in (("index_topk", 2048), ("index_kpool", 16))
    )
    if top_k % pool:
        raise ConfigError(
            f"config key 'index_topk' {top_k} is not a multiple of 'index_kpool' {pool}; correct "
            "one of them"
        )
    indexer = IndexerConfig(
        num_heads=hf.positive_int(config, "index_n_heads", 32),
        head_dim=hf.positive_int(config, "index_head_dim", 128),
        interleaved=False,  # nothing rotates
    )
    return PooledLatentConfig(
        num_heads=heads,
        nope_dim=nope,
        rope_dim=0,
        value_dim=hf.positive_int(config, "v_head_dim"),
        rank=hf.positive_int(config, "kv_lora_rank"),
        query_rank=hf.positive_int(config, "q_lora_rank"),
        scale=nope**-0.5,
        rope=None,
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        bias=hf.flag(config, "attention_bias", False),
        top_k=top_k,
        pool=pool,
        indexer=indexer,
    )


def _section(config: Mapping[str, Any], kinds: Sequence[str]) -> Mapping[str, Any] | None:
    """The section of the delta rule, if there is one, whose lists of layers must be those of the
    kinds.
    """
    section = config.get(_SECTION)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ConfigError(f"config key {_SECTION!r} must be an object, got {short(section)}")
    known = {*_LISTS, "gate_lower_bound", "safe_gate", *(key for key, _, _ in _SIZES)}
    for key, value in section.items():
        if value is not None and key not in known:
            raise ConfigError(
                f"config key {_SECTION!r} has the key {short(key)}, which this family does not "
                f"know and which may change what it computes; {REMOVE_KEY}"
            )
    by_kind = [i for i, kind in enumerate(kinds) if kind == DELTA]
    for key, own in zip(_LISTS, (by_kind, [*{*range(len(kinds))} - {*by_kind}]), strict=True):
        if section.get(key) not in (None, sorted(own)):
            raise ConfigError(
                f"config key {_SECTION!r} has other layers in {key!r} than 'layer_types'; correct "
                "one of them"
            )
    return section


def _delta(config: Mapping[str, Any], section: Mapping[str, Any] | None) -> DeltaConfig:
    """The mixer with the delta rule; the section's keys win over transformers' own."""
    heads, width, taps = (
        hf.positive_int(section or {}, key, hf.positive_int(config, other, default))
        for key, other, default in _SIZES
    )
    floor = config.get("linear_lower_bound", _FLOOR)
    if section is not None:
        floor = section.get("gate_lower_bound", floor)
        floor = _FLOOR if floor is None and section.get("safe_gate", True) else floor
    is_number = isinstance(floor, float | int) and not isinstance(floor, bool)
    if floor is not None and not (is_number and -1e4 < floor < 0):
        raise ConfigError(
            "config key 'linear_lower_bound', or 'gate_lower_bound' of 'linear_attn_config', must "
            f"be null, or negative and above -10000, got {short(floor)}"
        )
    return DeltaConfig(
        num_k_heads=heads,
        num_v_heads=heads,
        k_dim=width,
        v_dim=width,
        conv_width=taps,
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        decay="channel",
        gate_act="sigmoid",
        gate_rank=width,
        decay_floor=None if floor is None else float(floor),
    )


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with the published names of their sources."""
    delta = partial(channel_delta_specs, flat_rates=True)
    specs = [*indexed_param_specs(config, mixers=delta)]
    streams = config.residual.num_streams
    for i, layer in enumerate(config.layers):
        path, source = f"layers_{i}/", f"model.layers.{i}."
        if isinstance(c := layer.mixer, PooledLatentConfig) and c.indexer is not None:
            specs += _pool_specs(path, source, c.pool, c.indexer.head_dim, config.hidden_size)
        for block, start in _BLOCKS.items():
            specs += stream_specs(
                f"{path}{block}/",
                source + start,
                width=config.stream_width,
                count=(2 + streams) * streams,
                uses=3,
            )
    return tuple(specs)


def _pool_specs(path: str, source: str, pool: int, dim: int, width: int) -> Iterator[ParamSpec]:
    """The gates of pools' keys, which every device has."""
    own = f"{source}self_attn.indexer.index_kpool_compress_"
    gate, bias = Source(f"{own}gate", (dim, width)), Source(f"{own}ape", (pool, dim))
    yield ParamSpec(f"{path}index_gate", ArraySpec((width, dim), (None, None)), (gate,), transposed)
    array = ArraySpec(bias.shape, (None, None), jnp.dtype(jnp.float32))
    yield ParamSpec(f"{path}index_bias", array, (bias,), as_is)


FAMILY = ModelFamily(
    name="glm5_next",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
