"""StableLM: the shared decoder with LayerNorm; a quarter of each head rotates.

The blocks of the 12B model are parallel, and each of its heads has a LayerNorm of its own.

Source: ``modeling_stablelm`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    PRE_NORMS,
    NormSources,
    gqa_config,
    gqa_param_specs,
)
from jaxinfer.models.hf_rope import even_rotary, rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec

_PARTIAL_ROTARY = 0.25  # transformers' default
_SHARED = NormSources(names=("input_layernorm",))
_NAMES = TensorNames(qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"))


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    parallel = hf.flag(config, "use_parallel_residual", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=hf.flag(config, "use_qkv_bias", False),
        qk_norm="layers" if hf.flag(config, "qk_layernorm", False) else None,
        rope=even_rotary(rope_config(config, hf.head_dim(config), partial=_PARTIAL_ROTARY)),
        norms="shared" if parallel else "before",
        norm="layer",
        parallel=parallel,
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters; parallel blocks share their norm."""
    norms = _SHARED if config.layers[0].parallel else PRE_NORMS
    return gqa_param_specs(config, norms=norms, names=_NAMES)


FAMILY = ModelFamily(
    name="stablelm",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
