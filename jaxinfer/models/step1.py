"""Step 1 (StepFun; the text of Step-Audio): Llama's decoder with ALiBi of square roots.

Source: the published ``modeling_step1.py``, and vLLM's ``step1.py``, which reads keys of biases;
transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.positions import Alibi
from jaxinfer.nn.rope import RopeConfig

_BASE = 10000.0  # of a rope that no layer has


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu")
    heads = hf.positive_int(config, "num_attention_heads")
    head_dim = hf.positive_int(config, "hidden_size") // heads
    groups = hf.first_of(config, "num_attention_groups", "num_key_value_heads")
    length = hf.first_of(config, "max_seq_len", "max_position_embeddings")
    config.get("max_position_embeddings")  # some files have both
    sizes = {
        "num_key_value_heads": hf.positive_int(config, groups, 1),
        "max_position_embeddings": hf.positive_int(config, length),
    }
    hf.supported_only(config, "num_key_value_heads", sizes["num_key_value_heads"])
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return gqa_config(
        hf.with_values(config, sizes),
        dtype,
        qkv_bias=hf.flag(config, "attention_bias", False),
        o_bias=hf.flag(config, "attention_bias", False),
        mlp_bias=hf.flag(config, "mlp_bias", False),
        windows=(None,) * num_layers,
        head_dim=head_dim,
        rope=RopeConfig(head_dim, _BASE),
        rotates=(False,) * num_layers,
        activation="silu",
        attention={"alibi": Alibi(heads, root=True)},
        tied=True,
    )


FAMILY = ModelFamily(
    name="step1",
    config_from_hf=config_from_hf,
    param_specs=gqa_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
