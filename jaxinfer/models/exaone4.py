"""EXAONE 4 and the text of 4.5: norms after blocks and of heads.

Where some layers have windows, the others do not rotate.

Source: ``modeling_exaone4`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import exaone_windows
from jaxinfer.nn.decoder_config import DecoderSpec

_NORMS = NormSources(names=("post_attention_layernorm", "post_feedforward_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    windows, rotates = exaone_windows(config)
    return gqa_config(
        config,
        dtype,
        qk_norm="head",
        windows=windows,
        rotates=rotates,
        norms="after",
    )


FAMILY = ModelFamily(
    name="exaone4",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"(model\.)?visual\..*", r"mtp\..*"),
    optional_prefix="model.language_model.",  # of EXAONE 4.5
)
