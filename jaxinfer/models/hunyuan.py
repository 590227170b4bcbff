"""Hunyuan (dense and mixtures): norms of heads after rope, whose base "alpha" makes larger.

Source: ``modeling_hunyuan_v1_dense`` and ``modeling_hunyuan_v1_moe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config, gated_network
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import ROPE_KEYS, SECTIONS, rope_config
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from jaxinfer.nn.rope import RopeConfig
from pallas_kernels.route.routing import Routing

_NAMES = TensorNames(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))
_TENSORS = ExpertTensors(router="mlp.gate.wg", shared="mlp.shared_mlp.")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "use_qk_norm", True)
    hf.supported_only(config, "use_cla", False)
    hf.supported_only(config, "use_rotary_pos_emb", True)
    hf.supported_only(config, "norm_type", "rms")
    hf.flag(config, "enable_lm_head_fp32", True)  # sums are in float32 here
    bias, head_dim = hf.flag(config, "attention_bias", False), hf.head_dim(config)
    hf.supported_only(config, "attention_head_dim", head_dim)
    windows, ffns = windows_by_layer(config, None), None
    if "HunYuanMoEV1ForCausalLM" in config.get("architectures", ()):
        ffns = [_experts(config, i) for i in range(len(windows))]
    else:
        hf.supported_only(config, "mlp_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="rotated",
        head_dim=head_dim,
        windows=windows,
        rope=_rope(config, head_dim),
        ffns=ffns,
    )


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """The rope; "alpha" in a dynamic section multiplies its base by alpha ** (H / (H - 2))."""
    given = {key: config.get(key) for key in ROPE_KEYS}
    for place in SECTIONS:
        section = given[place]
        if not isinstance(section, Mapping) or section.get("alpha") is None:
            continue
        kind = section.get("rope_type") or section.get("type") or "default"
        hf.supported_only({"rope_type": kind}, "rope_type", "dynamic")
        alpha = hf.positive_float(section, "alpha")
        base = hf.positive_float(section, "rope_theta", given["rope_theta"] or 10000.0)
        return rope_config({"rope_theta": _stretched(base, alpha, head_dim)}, head_dim)
    return rope_config(given, head_dim)


def _stretched(base: float, alpha: float, head_dim: int) -> float:
    """The base of a rope that "alpha" makes longer."""
    found = 0.0
    with suppress(ArithmeticError):  # heads of two components, or an overflow
        found = base * alpha ** (head_dim / (head_dim - 2))
    if not hf.is_positive(found):
        raise ConfigError(
            f"rope key 'alpha' is {short(alpha)}, which gives heads of {head_dim} components no "
            "finite base; correct it"
        )
    return found


def _experts(config: Mapping[str, Any], layer: int) -> ExpertsConfig:
    """The experts of a layer, and the network that every token uses as well."""
    hf.supported_only(config, "use_mixed_mlp_moe", True)
    hf.supported_only(config, "moe_layer_num_skipped", 0)
    hf.supported_only(config, "norm_topk_prob", True)
    hf.supported_only(config, "routed_scaling_factor", 1)
    keys = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
    one = {key: _of_layer(config, key, layer) for key in keys}
    width = hf.positive_int(config, "intermediate_size")
    if (given := one["moe_intermediate_size"]) not in (None, width):
        raise ConfigError(
            f"config key 'moe_intermediate_size' is {short(given)}, and experts are as wide as "
            f"'intermediate_size', {width}; make them equal"
        )
    hf.supported_only(one, "num_shared_expert", 1)
    chosen = hf.positive_int(one, "moe_topk", 1)
    return experts_config(
        hf.with_values(config, one),
        count="num_experts",
        width="intermediate_size",
        routing=Routing(chosen, renormalised=True),
        shared=gated_network(config, width),
    )


def _of_layer(config: Mapping[str, Any], key: str, layer: int) -> Any:
    """A value that may be a list with one for each layer."""
    found = config.get(key)
    if not isinstance(found, list):
        return found
    if layer >= len(found):
        raise ConfigError(
            f"config key {key!r} is {short(found)}, which has no value of layer {layer}; correct it"
        )
    return found[layer]


FAMILY = ModelFamily(
    name="hunyuan",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs, names=_NAMES, experts=partial(expert_specs, names=_TENSORS)
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
