"""CodeGen: GPT-J with queries, values and keys in one tensor, group by group of heads.

Source: ``modeling_codegen`` of Hugging Face transformers.
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

# The four devices that the models were trained on.
_NAMES = NAMES._replace(qkv=("attn.qkv_proj",), groups=4)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    return gptj_config(config, dtype)


FAMILY = ModelFamily(
    name="codegen",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=NORMS, names=_NAMES, interleaved=True),
    ignored_tensors=(r"h\.\d+\.attn\.(bias|masked_bias|causal_mask)", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
