"""InternLM 2 and 2.5: the shared decoder under names of its own, with q, k and v in one tensor.

Source: the published ``modeling_internlm2.py``; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_NORMS = NormSources(names=("attention_norm", "ffn_norm"))
_NAMES = TensorNames(
    embed="model.tok_embeddings",
    head="output",
    qkv=("attention.wqkv",),
    packed=True,
    o="attention.wo",
    into=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    bias = hf.flag(config, "bias", True)
    return gqa_config(config, dtype, qkv_bias=bias, o_bias=bias)


FAMILY = ModelFamily(
    name="internlm2",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(
        r"model\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
        r"output\.weight",
    ),
)
