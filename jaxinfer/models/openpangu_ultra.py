"""openPangu-Ultra-MoE (Huawei): DeepSeek-V3's decoder with norms before and after blocks.

Source: the published ``modeling_openpangu_moe.py``; transformers has no class of it. The first
files have other names of DeepSeek's keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.latent import (
    LATENT_IGNORED_TENSORS,
    LatentNames,
    latent_config,
    latent_param_specs,
)
from jaxinfer.models.openpangu_parts import EXPERTS, NORMS, networks
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec

_FIRST_NAMES = MappingProxyType(
    {
        "kv_lora_rank": "attention_kv_lora_dim",
        "q_lora_rank": "attention_q_lora_dim",
        "qk_rope_head_dim": "attention_qk_rope_dim",
        "qk_nope_head_dim": "attention_qk_dim",
        "v_head_dim": "attention_v_dim",
        "n_routed_experts": "num_routed_experts",
        "n_shared_experts": "num_shared_experts",
        "first_k_dense_replace": "num_dense_layers",
    }
)
_DENSE = 3  # layers before those with experts, the published code's default
_NAMES = LatentNames()
_SANDWICH = _NAMES._replace(norms=NORMS)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in (("param_sink_number", 0), ("use_mhc", False), ("use_mome", False)):
        hf.supported_only(config, key, only)  # of openPangu 2
    found = {key: config.get(first) for key, first in _FIRST_NAMES.items()}
    own = hf.with_defaults(config, {key: one for key, one in found.items() if one is not None})
    decoder = latent_config(
        own,
        dtype,
        interleaved=True,
        ffns=networks(own, first=_DENSE),
    )
    norms = "both" if hf.flag(config, "sandwich_norm", False) else "before"
    eps, layers = decoder.norm_eps, decoder.layers
    layers = (replace(one, mixer=replace(one.mixer, norm_eps=eps), norms=norms) for one in layers)
    return replace(decoder, layers=tuple(layers))


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the norms after blocks if there are any."""
    names = _SANDWICH if config.layers[0].norms == "both" else _NAMES
    return latent_param_specs(config, EXPERTS, names=names)


FAMILY = ModelFamily(
    name="openpangu_ultra",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
