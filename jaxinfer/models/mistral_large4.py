"""The text of Mistral Large 4: latent attention to tokens that indexers choose, where some layers
read the latents of earlier ones.

Source: ``modeling_mistral_large4`` of Hugging Face transformers. Some layers do not rotate; those
that do have rope frequencies with learned factors. The tensors have Mistral's own names. Its
layers for drafts ("mtp_dspark") are not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.hf_rope import with_rope
from jaxinfer.models.indexed_latent import (
    growth_spec,
    indexed_config,
    indexed_param_specs,
    indexer_kinds,
)
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, LayerSpec
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig

type Layers = tuple[LayerSpec, ...]

# transformers' defaults
_HEADS, _INTERVAL, _CAP = 32, 4, 30.0
_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2048.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    }
)
# names of other families and of these files, in order; "model." before layers is left out there
_NAMES = (
    (r"^model\.embed_tokens\.", "tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"\.self_attn\.", ".attention."),
    (r"\.q_proj\.", ".wq."),
    (r"\.kv_a_proj_with_mqa\.", ".wkv_a_with_mqa."),
    (r"\.kv_b_proj\.", ".wkv_b."),
    (r"\.o_proj\.", ".wo."),
    (r"\.kv_a_layernorm\.", ".kv_a_norm."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.softmax_scaling\.scale$", ".ssmax_scaling.s"),
    (r"\.softmax_scaling\.bias$", ".ssmax_scaling.b"),
    (r"\.mlp\.(gate\.|experts\.|shared_experts\.)", r".\1"),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "attention_bias", False)
    if (rank := config.get("q_lora_rank")) is not None:
        raise ConfigError(
            f"config key 'q_lora_rank' is {short(rank)}, and queries have no latent; {REMOVE_KEY}"
        )
    hf.supported_only(config, "norm_topk_prob", True)
    groups = hf.positive_int(config, "n_group", 1) > 1  # of which the two best count
    own = with_rope(config, _ROPE)
    own = hf.with_values(own, {"topk_method": "noaux_tc" if groups else "greedy"})
    own = hf.with_values(own, {"q_lora_rank": None, "norm_topk_prob": True})
    ffns = networks_by_layer(own, biased_experts(own, scores="softmax", choice_bias=False), first=1)
    eps = hf.positive_float(config, "rms_norm_eps")
    kinds = indexer_kinds(config, len(ffns))
    more = {"learned_growth": True, "norm_eps": eps, "always": True}
    decoder = indexed_config(
        own, dtype, heads=_HEADS, interleaved=True, ffns=ffns, kinds=kinds, of_tokens=True, **more
    )
    layers = _with_sources(config, _without_ropes(config, decoder.layers))
    decoder = replace(decoder, layers=layers)
    cap = hf.positive_float(config, "final_logit_softcapping", _CAP)
    return replace(decoder, logit_cap=cap, learned_rope=bool(decoder.ropes))


def _without_ropes(config: Mapping[str, Any], layers: Layers) -> Layers:
    """The layers, of which some do not rotate: all components of their keys are expanded."""
    step = hf.positive_int(config, "no_rope_layer_interval", _INTERVAL)
    rotates = config.get("no_rope_layers")
    if rotates is None:
        rotates = [int((i + 1) % step != 0) for i in range(len(layers))]
    if not isinstance(rotates, list | tuple) or len(rotates) < len(layers):
        raise ConfigError(
            f"config key 'no_rope_layers' must hold 0 or 1 for each of the {len(layers)} layers"
        )
    made: list[LayerSpec] = []
    for layer, rotated in zip(layers, rotates, strict=False):
        mixer = layer.mixer
        assert isinstance(mixer, IndexedLatentConfig)
        plain = replace(mixer, rope=None, nope_dim=mixer.head_dim, rope_dim=0)
        made.append(replace(layer, mixer=mixer if rotated else plain))
    return tuple(made)


def _with_sources(config: Mapping[str, Any], layers: Layers) -> Layers:
    """The layers, of which some read the latents of the last one before them that shares such."""
    sources = config.get("kv_source_layers")
    sources = list(range(len(layers))) if sources is None else sources
    numbers = isinstance(sources, list | tuple) and all(isinstance(s, int) for s in sources)
    if not numbers or len(sources) != len(layers):
        raise ConfigError(
            f"config key 'kv_source_layers' must hold a layer for each of the {len(layers)} layers"
        )
    shared = {source for i, source in enumerate(sources) if source != i}
    last: dict[bool, int] = {}  # by whether they rotate
    made: list[LayerSpec] = []
    for i, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        mixer = layer.mixer
        assert isinstance(mixer, IndexedLatentConfig)
        kind = mixer.rope is not None
        if source != i and last.get(kind) != source:
            raise ConfigError(
                f"config key 'kv_source_layers' has {short(source)} for layer {i}, which is not "
                "the last such layer before it that others read; correct it"
            )
        if source == i and i in shared:
            last[kind] = i
            mixer = replace(mixer, shares=True)
        elif source != i:
            mixer = replace(mixer, reads=source, own_entries=False)
        made.append(replace(layer, mixer=mixer))
    return tuple(made)


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with Mistral's names of their sources."""
    specs = [*indexed_param_specs(config)]
    for i, layer in enumerate(config.layers):
        mixer = layer.mixer
        assert isinstance(mixer, IndexedLatentConfig)
        source = f"model.layers.{i}.self_attn."
        specs.append(growth_spec(f"layers_{i}/q_growth", source, mixer.num_heads, "heads"))
    for rope in config.ropes:  # one, or none if no layer rotates
        alpha = Source("lerope.alpha", (rope.width // 2,))
        array = ArraySpec(alpha.shape, (None,), jnp.dtype(jnp.float32))
        specs.append(ParamSpec("rope_alpha", array, (alpha,), as_is))
    return tuple(_renamed(spec) for spec in specs)


def _renamed(spec: ParamSpec) -> ParamSpec:
    def own(source: Source) -> Source:
        name = source.name
        for pattern, other in _NAMES:
            name = re.sub(pattern, other, name)
        return source._replace(name=name)

    return replace(spec, sources=tuple(map(own, spec.sources)))


FAMILY = ModelFamily(
    name="mistral_large4",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=(
        r"(vision_encoder|pre_mm_projector_norm|patch_merger|vision_language_adapter)\..*",
        *(r"mtp_dspark\..*", r"lerope\.alpha"),
    ),
)
