"""OLMo 2: the shared decoder with norms after each block, and of all heads of queries and of keys.

Source: ``modeling_olmo2`` of Hugging Face transformers. No norm precedes a GEMM, so ``norm_gemm``
does not apply; ``residual_norm`` normalises the outputs of blocks (see docs/adding-a-family.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec

_NORMS = NormSources(names=("post_attention_layernorm", "post_feedforward_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="all_heads",
        norms="after",
    )


FAMILY = ModelFamily(
    name="olmo2",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
