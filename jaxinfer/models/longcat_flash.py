"""LongCat-Flash: layers of two latent attentions and two networks, experts beside them, of which
some return the token itself.

A published layer is two layers here; the experts' output of the first is added at the end of the
second.

Source: ``modeling_longcat_flash`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config, gated_network
from jaxinfer.models.gqa import outer_specs
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    LatentNames,
    latent_attention,
    latent_decoder,
    latent_layer_specs,
)
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, LayerSpec
from jaxinfer.nn.ffn.shortcut_spec import ShortcutExpertsConfig, ShortcutResidual
from pallas_kernels.route.routing import Routing

_THETA = 1e7
_DEFAULTS = MappingProxyType(  # transformers'
    {
        "q_lora_rank": 1536,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "expert_ffn_hidden_size": 2048,
        "ffn_hidden_size": 12288,
        "routed_scaling_factor": 6.0,
    }
)
# transformers writes gates and ups of zero experts, too, which are behind the others
_OF_ZERO_EXPERTS = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up)_proj\.weight"
_TENSORS = ExpertTensors(
    router="mlp.router.classifier", choice_bias="mlp.router.e_score_correction_bias"
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    own = hf.with_defaults(config, _DEFAULTS)
    num_layers = hf.positive_int(config, "num_layers")
    hf.supported_only(config, "num_hidden_layers", 2 * num_layers, num_layers)
    for key in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        hf.supported_only(config, key, True)
    hf.supported_only(config, "attention_method", "MLA")
    hf.supported_only(config, "zero_expert_type", "identity")
    hf.supported_only(config, "norm_topk_prob", False)
    rope_dim = hf.positive_int(config, "qk_rope_head_dim")
    hf.supported_only(config, "head_dim", rope_dim)
    rope = rope_config(config, rope_dim, theta=_THETA)
    mixer, width = latent_attention(own, rope), hf.positive_int(config, "hidden_size")
    assert mixer.query_rank is not None, "the key has a default"
    mixer = replace(
        mixer,
        scale=mixer.scale * (width / mixer.query_rank) ** 0.5,
        latent_scale=(width / mixer.rank) ** 0.5,
    )
    dense = gated_network(own, hf.positive_int(own, "ffn_hidden_size"))
    both = ShortcutExpertsConfig(dense=dense, mixture=_experts(own))
    layers = (LayerSpec(mixer, both), LayerSpec(mixer, dense)) * num_layers
    lengths = rope.lengths(hf.positive_int(config, "max_position_embeddings"))
    return replace(latent_decoder(own, dtype, layers, lengths), residual=ShortcutResidual())


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    zeros = hf.layer_index(config, "zero_expert_num", 0)
    routing = Routing(
        chosen=hf.positive_int(config, "moe_topk"),
        scale=hf.positive_float(config, "routed_scaling_factor"),
    )
    return experts_config(
        config,
        count="n_routed_experts",
        width="expert_ffn_hidden_size",
        routing=routing,
        more_choices=zeros,
        choice_bias=True,
        router_bias=hf.flag(config, "router_bias", False),
        zero_experts=zeros,
    )


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with Hugging Face's names of their sources."""
    specs = outer_specs(config)
    for i, layer in enumerate(config.layers):
        path, source, part = f"layers_{i}/", f"model.layers.{i // 2}.", i % 2
        names = LatentNames(
            own=f"self_attn.{part}.",
            norms=(f"input_layernorm.{part}", f"post_attention_layernorm.{part}"),
            network=f"mlps.{part}.",
        )
        ffn = layer.ffn
        if isinstance(ffn, ShortcutExpertsConfig):
            specs += latent_layer_specs(config, layer, path, source, names, dense=ffn.dense)
            specs += expert_specs(path, source, ffn.mixture, config.hidden_size, _TENSORS)
        else:
            specs += latent_layer_specs(config, layer, path, source, names)
    return tuple(specs)


FAMILY = ModelFamily(
    name="longcat_flash",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(*LATENT_IGNORED_TENSORS, r"model\.mtp\..*", _OF_ZERO_EXPERTS),
)
