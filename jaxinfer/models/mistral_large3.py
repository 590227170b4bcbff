"""Mistral Large 3: DeepSeek-V3's decoder with experts by a softmax, and queries that grow with the
position.

Its config.json has DeepSeek's keys, its tensors these names or Mistral's own.

Source: ``mistral_large_3.py`` of vLLM, and the keys that it makes of a params.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.hf_rope import SECTIONS
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, latent_config, latent_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec, QueryGrowth

_DENSE, _GROWTH = 3, "llama_4_scaling"
_OWN = r"^(?:model\.)?"  # names of layers alone get it when they are read
_LAYER, _OWN_LAYER = r"model.layers.\1.", rf"{_OWN}layers\.(\d+)\."
_NETWORKS = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
_NAMES = (
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attention.wq_a", "self_attn.q_a_proj"),
    ("attention.q_a_norm", "self_attn.q_a_layernorm"),
    ("attention.wq_b", "self_attn.q_b_proj"),
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wkv_a_with_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attention.kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attention.wkv_b", "self_attn.kv_b_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("gate", "mlp.gate"),
    *((f"feed_forward.{own}", f"mlp.{name}") for own, name in _NETWORKS),
    *((f"shared_experts.{own}", f"mlp.shared_experts.{name}") for own, name in _NETWORKS),
)
_OTHER_NAMES = (
    *((rf"{_OWN_LAYER}{own}\.", rf"{_LAYER}{name}.") for own, name in _NAMES),
    *(
        (rf"{_OWN_LAYER}experts\.(\d+)\.{own}\.", rf"{_LAYER}mlp.experts.\2.{name}.")
        for own, name in _NETWORKS
    ),
    (rf"{_OWN}norm\.", "model.norm."),
    (rf"{_OWN}tok_embeddings\.", "model.embed_tokens."),
    (rf"{_OWN}output\.", "lm_head."),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu")
    hf.supported_only(config, "moe_layer_freq", 1)
    hf.supported_only(config, "topk_method", "greedy", "group_limited_greedy")  # without a bias
    groups = hf.positive_int(config, "n_group", 1) > 1  # the best score of a group counts
    own = hf.with_values(
        config,
        {
            "topk_method": "group_limited_greedy" if groups else "greedy",
            "norm_topk_prob": hf.flag(config, "norm_topk_prob", True),
            **_rope_sections(config),
        },
    )
    experts = biased_experts(own, scores="softmax", choice_bias=False)
    decoder = latent_config(
        own,
        dtype,
        interleaved=True,
        ffns=networks_by_layer(config, experts, first=_DENSE),
        growth=_growth(config),
    )
    eps, layers = decoder.norm_eps, decoder.layers
    layers = (replace(layer, mixer=replace(layer.mixer, norm_eps=eps)) for layer in layers)
    return replace(decoder, layers=tuple(layers))


def _growth(config: Mapping[str, Any]) -> QueryGrowth | None:
    """The growth of queries; None without its section."""
    section = config.get(_GROWTH)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ConfigError(f"config key {_GROWTH!r} must be a section, got {short(section)}")
    original = hf.positive_int(section, "original_max_position_embeddings")
    return QueryGrowth(hf.positive_float(section, "beta"), original)


def _rope_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of rope: an ``attention_factor`` of 1 says that YaRN scales neither rotations
    nor scores, and without it rotations are scaled by DeepSeek's quotient alone.
    """
    found: dict[str, Any] = {}
    for place in SECTIONS:
        section = config.get(place)
        if not isinstance(section, Mapping):
            continue
        if section.get("rope_type", section.get("type")) != "yarn":
            continue
        if section.get("attention_factor") is None:
            found[place] = {"mscale": 1.0, **section}
            continue
        hf.supported_only(section, "attention_factor", 1.0)
        found[place] = {key: section[key] for key in section if not key.startswith("mscale")}
    return found


FAMILY = ModelFamily(
    name="mistral_large3",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=(
        *LATENT_IGNORED_TENSORS,
        r"(vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\..*",
    ),
    other_names=_OTHER_NAMES,
)
