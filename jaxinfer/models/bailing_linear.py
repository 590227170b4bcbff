"""Lightning attention in Ring-linear 2.0 (BailingMoeLinearV2), Ling and Ring 2.5 (BailingMoeV2_5).

The last layer of each group, and those after the last whole group, have attention: grouped-query
in the former, latent in the latter. Experts are those of Ling 2.0.

Source: the ``modeling_bailing_moe_linear_v2`` and ``modeling_bailing_moe_v2_5`` of the published
files; they are not in transformers. Tests compare with a reference in NumPy
(``tests/kit/bailing.py``). Decays are the published code's, 1 - (layer - 1) / (layers - 1) of the
slopes; vLLM and SGLang have 1 - layer / (layers - 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.bailing_parts import (
    NAMES,
    TENSORS,
    biased_sigmoid_experts,
    check_keys,
    with_rotated_part,
)
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import expert_specs, networks_by_layer
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.hybrid import DELTA, FULL
from jaxinfer.models.latent import LatentNames, latent_attention, latent_decoder, latent_param_specs
from jaxinfer.models.lightning import LightningTensors, lightning_specs
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec, LayerSpec, MixerSpec
from jaxinfer.nn.mixers.latent_spec import LatentAttentionConfig
from jaxinfer.nn.mixers.lightning_spec import LightningConfig
from jaxinfer.nn.positions import Alibi
from jaxinfer.nn.rope import RopeConfig

_ROTATED = 0.5  # the published code's default
_LIGHTNING = LightningTensors(
    qkv="attention.query_key_value",
    gate="attention.g_proj",
    o="attention.dense",
    norm="attention.g_norm",
    qk_norms=("attention.query_layernorm", "attention.key_layernorm"),
    packed=False,
)
_LATENT = LatentNames(embed="model.word_embeddings", own="attention.", o="dense")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    check_keys(config)
    hf.supported_only(config, "use_qkv_bias", False)
    kinds, ffns = _kinds(config), networks_by_layer(config, biased_sigmoid_experts(config), first=1)
    head_dim = hf.head_dim(config)
    heads = hf.positive_int(config, "num_attention_heads")
    for key in ("num_kv_heads_for_linear_attn", "linear_key_value_heads"):
        hf.supported_only(config, key, heads)
    rope = rope_config(with_rotated_part(config, head_dim), head_dim, partial=_ROTATED)
    if "BailingMoeV2_5ForCausalLM" in config.get("architectures", ()):
        decoder = _with_latents(config, dtype, ffns)
    else:
        decoder = gqa_config(
            config,
            dtype,
            windows=(None,) * len(kinds),
            qk_norm="head" if hf.flag(config, "use_qk_norm", True) else None,
            head_dim=head_dim,
            rope=rope,
            ffns=ffns,
        )
    layers = list(decoder.layers)
    for i, kind in enumerate(kinds):
        if kind == DELTA:
            layers[i] = replace(layers[i], mixer=_lightning(config, i, len(kinds), rope))
    return replace(decoder, layers=tuple(layers))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, by the size of a group."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    size = hf.positive_int(config, "layer_group_size")
    whole = num_layers // size * size
    return [FULL if (i + 1) % size == 0 or i >= whole else DELTA for i in range(num_layers)]


def _with_latents(config: Mapping[str, Any], dtype: jnp.dtype, ffns: Any) -> DecoderSpec:
    """A decoder with latent attention in all layers, whose shared components rotate whole."""
    whole = hf.with_values(config, {"partial_rotary_factor": None})
    rope = rope_config(whole, hf.positive_int(config, "qk_rope_head_dim"))
    interleaved = hf.flag(config, "rope_interleave", True)
    mixer: MixerSpec = latent_attention(config, rope, interleaved=interleaved, query_rank=None)
    layers = tuple(LayerSpec(mixer, ffn) for ffn in ffns)
    lengths = rope.lengths(hf.positive_int(config, "max_position_embeddings"))
    return latent_decoder(config, dtype, layers, lengths)


def _lightning(
    config: Mapping[str, Any], layer: int, num_layers: int, rope: RopeConfig
) -> LightningConfig:
    """The mixer of a layer: decays become weaker from layer to layer."""
    heads, head_dim = hf.positive_int(config, "num_attention_heads"), hf.head_dim(config)
    groups = hf.positive_int(config, "group_norm_size", 1)
    if heads % groups:
        raise ConfigError(
            f"config key 'num_attention_heads' {heads} is not a multiple of 'group_norm_size' "
            f"{groups}, the number of norms of heads' outputs"
        )
    factor = 1 - (layer - 1) / max(num_layers - 1, 1) + 1e-5
    return LightningConfig(
        num_heads=heads,
        head_dim=head_dim,
        slopes=Alibi(heads, factor),
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        norm_groups=groups,
        scale=head_dim**-0.5,
        silu=hf.flag(config, "linear_silu", False),
        qk_norm=hf.flag(config, "use_qk_norm", True),
        rope=rope if hf.flag(config, "linear_rope", True) else None,
    )


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the published names of their sources."""
    experts = partial(expert_specs, names=TENSORS)
    mixers = partial(lightning_specs, names=_LIGHTNING)
    if any(isinstance(layer.mixer, LatentAttentionConfig) for layer in config.layers):
        return latent_param_specs(config, experts, mixers, _LATENT)
    return gqa_param_specs(config, experts=experts, names=NAMES, mixers=mixers)


FAMILY = ModelFamily(
    name="bailing_linear",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq"),
)
