"""Sarvam's mixtures of experts with latent attention: DeepSeek-V3's with other keys.

Source: ``configuration_sarvam_mla`` of Hugging Face transformers, which loads them as
``DeepseekV3ForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.hf_rope import SECTIONS
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS, latent_config, latent_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_SCALE = 2.5  # transformers' default
_ROPE = "deepseek_yarn"  # which is "yarn"


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "moe_layer_freq", 1)
    hf.supported_only(config, "moe_router_enable_expert_bias", True)
    nope, rope_dim, rank = (
        hf.positive_int(config, key)
        for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    hf.supported_only(config, "q_head_dim", nope + rope_dim)
    hf.supported_only(config, "head_dim", rope_dim, rank + rope_dim)  # of a token's entry
    values: dict[str, Any] = {place: _section(config.get(place)) for place in SECTIONS}
    values["head_dim"] = rope_dim
    values["q_lora_rank"] = config.get("q_lora_rank")  # without it queries have no latent
    heads = hf.positive_int(config, "num_attention_heads")
    values["num_key_value_heads"] = hf.positive_int(config, "num_key_value_heads", heads)
    values["routed_scaling_factor"] = hf.positive_float(config, "routed_scaling_factor", _SCALE)
    for name, other in (("n_routed_experts", "num_experts"), ("scoring_func", "score_function")):
        values[name] = config.get(name) if config.get(other) is None else config.get(other)
    shared = config.get("num_shared_experts")
    values["n_shared_experts"] = config.get("n_shared_experts") if shared is None else shared
    values["norm_topk_prob"] = hf.flag(config, "norm_topk_prob", True)
    own = hf.with_values(config, values)
    return latent_config(
        own,
        dtype,
        interleaved=hf.flag(config, "rope_interleave", True),
        ffns=networks_by_layer(config, biased_experts(own), first=1),
    )


def _section(given: Any) -> Any:
    """A rope section whose type has the common name."""
    if not isinstance(given, Mapping):
        return given
    return {key: "yarn" if value == _ROPE else value for key, value in given.items()}


FAMILY = ModelFamily(
    name="sarvam_mla",
    config_from_hf=config_from_hf,
    param_specs=latent_param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
