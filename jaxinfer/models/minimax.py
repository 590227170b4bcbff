"""MiniMax-Text-01 and MiniMax-M1: lightning attention, in some layers attention, and experts.

Each block's output is added to the norm that the block reads. "rotary_dim" components of a head
rotate, as the weights were trained, also under transformers' name, with which it rotates all.

Source: ``modeling_minimax`` of Hugging Face transformers; the published files of MiniMaxText01 and
MiniMaxM1 have other names for its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import MIXTRAL_TENSORS, expert_specs, experts_config, experts_per_token
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import without_partial
from jaxinfer.models.hybrid import DELTA, FULL
from jaxinfer.models.lightning import lightning_specs
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.layer_spec import BlockFactors
from jaxinfer.nn.mixers.lightning_spec import LightningConfig
from jaxinfer.nn.positions import Alibi
from pallas_kernels.route.routing import Routing

_THETA = 1e6  # transformers' default
_NORM_EPS = 1e-6  # of the norm of heads' outputs, whatever rms_norm_eps is
_LEAST = 1e-5  # of the factors of decays
_BUFFERS = r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    own = "MiniMaxForCausalLM" in config.get("architectures", ())
    if not hf.flag(config, "postnorm", own):
        raise ConfigError(
            "config key 'postnorm' is false, or missing, where false is its default; only true, "
            "with which blocks add to their norms, is supported"
        )
    _refuse_shared(config)
    for unused in ("block_size", "router_jitter_noise", "shared_moe_mode"):
        config.get(unused)  # chunks of other programs; training
    kinds, window = _kinds(config), None
    if config.get("sliding_window") is not None:
        window = hf.positive_int(config, "sliding_window")
    routing = Routing(experts_per_token(config), renormalised=True)
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also of lightning attention
    experts = experts_config(
        config, count="num_local_experts", width="intermediate_size", routing=routing
    )
    head_dim = hf.head_dim(config)
    part = hf.positive_int(config, "rotary_dim", head_dim) / head_dim
    decoder = gqa_config(
        without_partial(config, part),
        dtype,
        head_dim=head_dim,
        theta=_THETA,
        partial_rotary=part,
        windows=(window,) * len(kinds),
        ffns=[experts] * len(kinds),
    )
    mlp, layers = _factors(config, "mlp", "mlp"), []
    of_kind = {
        DELTA: _factors(config, "linear_attn", "linear_attention"),
        FULL: _factors(config, "full_attn", "full_attention"),
    }
    for i, kind in enumerate(kinds):
        layer = replace(decoder.layers[i], on_norms=(of_kind[kind], mlp))
        if kind == DELTA:
            layer = replace(layer, mixer=_lightning(config, i, len(kinds), own=own))
        layers.append(layer)
    return replace(decoder, layers=tuple(layers))


def _lightning(
    config: Mapping[str, Any], layer: int, num_layers: int, *, own: bool
) -> LightningConfig:
    """The mixer of a layer: decays become weaker from layer to layer."""
    heads = hf.positive_int(config, "num_attention_heads")
    last = num_layers - 1 + _LEAST if own else max(num_layers - 1, 1)
    slopes = Alibi(heads, 1 - layer / last + _LEAST, geometric=own)
    return LightningConfig(
        num_heads=heads,
        head_dim=hf.head_dim(config),
        slopes=slopes,
        norm_eps=_NORM_EPS,
        silu=True,
    )


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer; by default every second one has lightning attention."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = hf.layer_kinds(config, "layer_types", num_layers, (DELTA, FULL))
    if kinds is not None:
        return kinds
    given = config.get("attn_type_list")
    if given is None:
        return [DELTA if i % 2 else FULL for i in range(num_layers)]
    fits = isinstance(given, list | tuple) and len(given) == num_layers
    if not fits or not all(type(one) is int and one in (0, 1) for one in given):
        raise ConfigError(
            "config key 'attn_type_list' must hold 0 (lightning attention) or 1 for each of the "
            f"{num_layers} layers, got {short(given)}"
        )
    return [FULL if one else DELTA for one in given]


def _factors(config: Mapping[str, Any], name: str, published: str) -> BlockFactors:
    """The factors of a kind of blocks, under transformers' name or that of published files."""
    alpha, beta = (
        hf.positive_float(config, hf.first_of(config, new, old), 1.0)
        for new, old in (
            (f"{name}_{which}_factor", f"layernorm_{published}_{which}")
            for which in ("alpha", "beta")
        )
    )
    return BlockFactors(alpha, beta)


def _refuse_shared(config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for experts that all tokens use, which no published file has."""
    given = config.get("shared_intermediate_size")
    widths = given if isinstance(given, list | tuple) else [given or 0]
    if any(width != 0 for width in widths):
        raise ConfigError(
            f"config key 'shared_intermediate_size' is {short(given)}, and only 0 is supported"
        )


FAMILY = ModelFamily(
    name="minimax",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        experts=partial(expert_specs, names=MIXTRAL_TENSORS),
        mixers=lightning_specs,
    ),
    ignored_tensors=(*GQA_IGNORED_TENSORS, _BUFFERS),
)
