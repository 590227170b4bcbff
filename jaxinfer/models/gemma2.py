"""Gemma 2: as Gemma 3, but for norms of heads; scores and logits are limited by a tanh.

VaultGemma has no norms after blocks.

Source: ``modeling_gemma2`` and ``modeling_vaultgemma`` of Hugging Face transformers. Every second
layer has a window. Triton's kernels of attention limit scores, those of Mosaic and in C++ do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gemma_parts import AROUND_BLOCKS
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.params import ParamSpec
from jaxinfer.nn.decoder_config import DecoderSpec

# transformers' defaults
_HEAD_DIM, _SCALAR = 256, 256


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "use_bidirectional_attention", False)
    hf.supported_only(config, "hidden_act", "gelu_pytorch_tanh", "gelu")  # not the one in use
    is_vault = "VaultGemmaForCausalLM" in config.get("architectures", ())
    bias = hf.flag(config, "attention_bias", False)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        windows=_windows(config),
        activation=hf.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        scale=hf.positive_float(config, "query_pre_attn_scalar", _SCALAR) ** -0.5,
        norms="before" if is_vault else "both",
        norm_dtype=jnp.dtype(jnp.float32),
        embed_scale=hf.positive_int(config, "hidden_size") ** 0.5,
        attention={"cap": _cap(config, "attn_logit_softcapping", 50.0)},
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


def _cap(config: Mapping[str, Any], key: str, default: float) -> float | None:
    """A limit: transformers' ``default`` if the key is absent, None if it is null."""
    return None if config.get(key, default) is None else hf.positive_float(config, key, default)


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default every second layer has none."""
    window = sliding_window(config)
    hf.supported_only(config, "sliding_window_size", window)  # the same one, in older files
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(None if i % 2 else window for i in range(num_layers))


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the norms that the layers have."""
    before = AROUND_BLOCKS._replace(names=AROUND_BLOCKS.names[::2])
    return gqa_param_specs(
        config, norms=before if config.layers[0].norms == "before" else AROUND_BLOCKS
    )


FAMILY = ModelFamily(
    name="gemma2",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
