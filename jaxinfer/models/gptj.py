"""GPT-J: parallel blocks that share a LayerNorm; adjacent components of a part of heads rotate.

Source: ``modeling_gptj`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gptj_config import NAMES, NORMS, gptj_config
from jaxinfer.models.gqa import gqa_param_specs
from jaxinfer.nn.decoder_config import DecoderSpec


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gptj_config(config, dtype)


FAMILY = ModelFamily(
    name="gptj",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=NORMS, names=NAMES, interleaved=True),
    ignored_tensors=(r"h\.\d+\.attn\.(bias|masked_bias)", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
