"""Zamba2: Mamba-2, in some layers after a block of attention and a network that several layers use
with addends of their own.

Source: ``modeling_zamba2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS
from jaxinfer.models.mamba import Mamba2Keys, MambaKeys, mamba2_config, mamba2_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.zamba_parts import (
    HYBRID,
    MAMBA,
    attention_config,
    block_count,
    kinds,
    zamba_decoder,
    zamba_specs,
)
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig
from jaxinfer.nn.mixers.after_block_spec import AfterBlockConfig
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config

_KEYS = Mamba2Keys(
    sizes=MambaKeys(
        "mamba_d_state", "mamba_d_conv", "mamba_expand", "add_bias_linear", "use_conv_bias"
    ),
    heads="n_mamba_heads",
    head_dim="mamba_headdim",
    groups="mamba_ngroups",
    chunk="chunk_size",
)
# Of kernels, of the first values in training, and what is not used.
_UNUSED = (
    *("use_mamba_kernels", "use_mem_eff_path", "time_step_max", "time_step_floor"),
    *("kv_channels", "num_query_groups"),
)
_RANK, _STEP = 128, 0.001  # transformers' defaults
_M, _H = MAMBA[:1], (HYBRID,)
_KINDS = _M + (_M * 5 + _H) * 7 + _M * 4 + _H + _M * 3 + _H + _M * 2
_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    into=("feed_forward.gate_up_proj",),
    down="feed_forward.down_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in _UNUSED:
        config.get(key)
    hf.supported_only(config, "use_long_context", False)
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    hybrids, uses = kinds(config, _KINDS), 0
    derived = {
        "attention_hidden_size": 2 * width,
        "attention_head_dim": 2 * width // heads,
        "head_dim": 2 * width // heads,
        "hybrid_layer_ids": [i for i, hybrid in enumerate(hybrids) if hybrid],
    }
    for key, value in derived.items():
        hf.supported_only(config, key, value)
    attention = attention_config(
        config, 2 * width // heads, rotates=hf.flag(config, "use_mem_rope", False)
    )
    network = FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation=hf.activation(config, "hidden_act", "gelu"),
        gated=True,
        bias=hf.flag(config, "add_bias_linear", False),
    )
    mamba, mixers = _mamba(config), []
    rank = hf.positive_int(config, "adapter_rank", _RANK)
    adapted = hf.flag(config, "use_shared_attention_adapter", False)
    if adapted and attention.num_kv_heads != attention.num_heads:
        raise ConfigError(
            "config key 'use_shared_attention_adapter' needs as many 'num_key_value_heads' as "
            "'num_attention_heads', since the addends of keys and of queries are equally wide"
        )
    num_blocks = block_count(config, hf.positive_int(config, "num_mem_blocks", 1), sum(hybrids))
    for hybrid in hybrids:
        block = AfterBlockConfig(
            block=uses % num_blocks,
            attention=attention,
            network=network,
            other=mamba,
            qkv_rank=rank if adapted else None,
            gate_up_rank=rank,
        )
        mixers.append(block if hybrid else mamba)
        uses += hybrid
    return zamba_decoder(config, dtype, mixers, num_blocks)


def _mamba(config: Mapping[str, Any]) -> Mamba2Config:
    """The mixer of every layer; its convolution always has a bias, and its norm an epsilon of its
    own.
    """
    given = mamba2_config(config, _KEYS, heads=8, state=64)
    least = hf.positive_float(config, "time_step_min", _STEP)
    return replace(given, conv_bias=True, norm_eps=1e-5, step_limit=(least, given.step_limit[1]))


FAMILY = ModelFamily(
    name="zamba2",
    config_from_hf=config_from_hf,
    param_specs=partial(zamba_specs, block="shared_transformer", names=_NAMES, mixers=mamba2_specs),
    # where a block is stored with every layer that uses it
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.layers\.\d+\.shared_transformer\..*"),
)
