"""Chameleon's text decoder: LayerNorms of each head, and norms before or after blocks.

Source: ``modeling_chameleon`` of Hugging Face transformers. As there, the tokens of images are
never drawn. Tensors that make them of images are not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec

_HEADS_EPS, _OF_IMAGES = 1e-5, "IMGIMG"  # transformers' constants


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for unused in ("model_parallel_size", "vq_config"):
        config.get(unused)
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=hf.flag(config, "mlp_bias", False),
        qk_norm="layers_bias",
        norms="after" if hf.flag(config, "swin_norm", False) else "before",
        attention={"qk_norm_eps": _HEADS_EPS},
        never=_image_tokens(config),
    )


def _image_tokens(config: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """The tokens of images, as ranges."""
    given = config.get("vocabulary_map") or {}
    size = hf.positive_int(config, "vocab_size")
    ids = given.values() if isinstance(given, Mapping) else [None]
    if not all(type(one) is int and 0 <= one < size for one in ids):
        raise ConfigError(
            f"config key 'vocabulary_map' must hold ids below {size}, got {short(given)}"
        )
    ranges: list[tuple[int, int]] = []
    for one in sorted(one for name, one in given.items() if name.startswith(_OF_IMAGES)):
        if ranges and ranges[-1][1] == one:
            ranges[-1] = (ranges[-1][0], one + 1)
        else:
            ranges.append((one, one + 1))
    return tuple(ranges)


FAMILY = ModelFamily(
    name="chameleon",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=TensorNames(stacked_norms=True)),
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.vqmodel\..*"),
)
