"""Jamba: Mamba in most layers, attention without rope in the others, experts in every other one.

Source: ``modeling_jamba`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.mamba import HYBRID_KEYS, mamba_config, mamba_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig, FeedForwardSpec
from pallas_kernels.route.routing import Routing

_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    into=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_EXPERTS = ExpertTensors(
    router="feed_forward.router",
    gate="feed_forward.experts.{}.gate_proj",
    up="feed_forward.experts.{}.up_proj",
    down="feed_forward.experts.{}.down_proj",
)
_NUM_EXPERTS = 16  # transformers' default


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    config.get("num_logits_to_keep")  # which logits other programs return
    hf.supported_only(config, "mamba_inner_layernorms", True)
    eps = hf.positive_float(config, "rms_norm_eps")
    decoder = gqa_config(
        config,
        dtype,
        rotates=[False] * num_layers,
        norm_eps=eps,
        ffns=_networks(config, num_layers),
    )
    attends = _every(config, "attn_layer", num_layers, 8, 4)
    mamba = mamba_config(
        config, HYBRID_KEYS, rank="mamba_dt_rank", inner=None, inner_norms="weights", norm_eps=eps
    )
    return with_mixers(decoder, {i: mamba for i in range(num_layers) if not attends[i]})


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer: experts at a period, if there are several."""
    width = hf.positive_int(config, "intermediate_size")
    dense = FeedForwardConfig(width=width, activation="silu", gated=True)
    sparse = _every(config, "expert_layer", num_layers, 2, 1)
    key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    if hf.positive_int(config, key, _NUM_EXPERTS) == 1:
        config.get("num_experts_per_tok")
        return [dense] * num_layers
    hf.supported_only(config, "hidden_act", "silu", "swish")  # also after the convolution
    experts = experts_config(
        hf.with_values(config, {"num_experts": hf.positive_int(config, key, _NUM_EXPERTS)}),
        count="num_experts",
        width="intermediate_size",
        routing=Routing(hf.positive_int(config, "num_experts_per_tok", 2)),
    )
    return [experts if one else dense for one in sparse]


def _every(
    config: Mapping[str, Any], name: str, num_layers: int, period: int, offset: int
) -> list[bool]:
    """True for each layer at the offset of a period, whose defaults are transformers'."""
    period = hf.positive_int(config, f"{name}_period", period)
    offset = hf.layer_index(config, f"{name}_offset", offset)
    if offset >= period:
        raise ConfigError(
            f"config key '{name}_offset' is {offset}, and must be smaller than '{name}_period' "
            f"{period}"
        )
    return [i % period == offset for i in range(num_layers)]


FAMILY = ModelFamily(
    name="jamba",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("input_layernorm", "pre_ff_layernorm")),
        names=_NAMES,
        experts=partial(expert_specs, names=_EXPERTS),
        mixers=mamba_specs,
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
