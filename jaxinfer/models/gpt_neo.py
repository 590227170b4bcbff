"""GPT-Neo: learned positions, layers with windows, and scores that are not scaled.

Source: ``modeling_gpt_neo`` of Hugging Face transformers.
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
from jaxinfer.models.gqa import NormSources, gqa_param_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.plain import plain_config
from jaxinfer.nn.decoder_config import DecoderSpec

_WINDOW = 256  # transformers' default
_GLOBAL, _LOCAL = "global", "local"
_NORMS = NormSources(names=("ln_1", "ln_2"))
_NAMES = TensorNames(
    embed="wte",
    positions="wpe",
    layer="h.{}.",
    final_norm="ln_f",
    qkv=tuple(f"attn.attention.{name}_proj" for name in "qkv"),
    o="attn.attention.out_proj",
    into=("mlp.c_fc",),
    down="mlp.c_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    width, heads, layers = (
        hf.positive_int(config, key) for key in ("hidden_size", "num_heads", "num_layers")
    )
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": hf.positive_int(config, "intermediate_size", 4 * width),
    }
    return plain_config(
        config,
        dtype,
        sizes=sizes,
        num_layers=layers,
        activation=hf.activation(config, "activation_function", "gelu_new"),
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        qkv_bias=False,
        windows=_windows(config, layers),
        scale=1.0,
        num_positions=hf.positive_int(config, "max_position_embeddings"),
    )


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The window of each layer: of "local" ones in ``attention_layers``, or in ``attention_types``,
    which has [kinds, times].
    """
    window = hf.positive_int(config, "window_size", _WINDOW)
    given = config.get("attention_types") or [[[_GLOBAL, _LOCAL], layers // 2]]
    if (expanded := config.get("attention_layers")) is not None:
        given = [[[kind], 1] for kind in expanded] if isinstance(expanded, list) else expanded
    try:
        kinds = [kind for own, times in given for _ in range(times) for kind in own]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not {*kinds} <= {_GLOBAL, _LOCAL}:
        raise ConfigError(
            f"config key 'attention_types' is {short(given)}; it must give {_GLOBAL!r} or "
            f"{_LOCAL!r} for each of the {layers} layers"
        )
    return tuple(window if kind == _LOCAL else None for kind in kinds)


FAMILY = ModelFamily(
    name="gpt_neo",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=_NORMS, names=_NAMES),
    ignored_tensors=(r"h\.\d+\.attn\.attention\.(masked_)?bias", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
