"""Phi-3.5-MoE: LayerNorm with biases, LongRoPE, two experts by SparseMixer.

Source: ``modeling_phimoe`` of Hugging Face transformers (Liu et al. 2023, arXiv:2310.00811). Unlike
there, the factors of LongRoPE follow the engine's context length, as those of Phi-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.nn.decoder_config import DecoderSpec
from pallas_kernels.route.routing import Routing

# transformers' defaults
_THETA, _JITTER = 1e6, 0.01
_TENSORS = ExpertTensors(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "num_experts_per_tok", 2)
    bias, window = hf.flag(config, "attention_bias", False), None
    if config.get("sliding_window") is not None:
        window = hf.positive_int(config, "sliding_window")
    windows = windows_by_layer(config, window)
    jitter = hf.positive_float(config, "router_jitter_noise", _JITTER)
    experts = experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        routing=Routing(2, "sparsemixer", spread=2 * jitter),
    )
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        theta=_THETA,
        windows=windows,
        norm="layer",
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        ffns=[experts] * len(windows),
        head_bias=hf.flag(config, "lm_head_bias", False),
    )


FAMILY = ModelFamily(
    name="phimoe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=partial(expert_specs, names=_TENSORS)),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
