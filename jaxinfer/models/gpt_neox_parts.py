"""Names of tensors, and keys, that GPT-NeoX and its Japanese model have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import gqa_config
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.decoder_config import DecoderSpec


def neox_names(prefix: str) -> TensorNames:
    """The names of tensors behind the model's name."""
    return TensorNames(
        embed=f"{prefix}.embed_in",
        layer=f"{prefix}.layers.{{}}.",
        final_norm=f"{prefix}.final_layer_norm",
        head="embed_out",
        qkv=("attention.query_key_value",),
        o="attention.dense",
        into=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        packed=True,
    )


def neox_ignored(prefix: str) -> tuple[str, ...]:
    """The tensors of files that are no parameters."""
    buffers = r"\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    return (prefix + buffers, r"embed_out\.weight")


def neox_config(
    config: Mapping[str, Any], dtype: jnp.dtype, *, partial_rotary: float, **more: Any
) -> DecoderSpec:
    """A decoder with LayerNorms and a network without a gate, whose heads rotate in part.

    ``partial_rotary`` is the default of the part, ``more`` are further arguments of ``gqa_config``.
    """
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    part = hf.positive_float(config, "rotary_pct", partial_rotary)
    config.get("num_key_value_heads")  # which transformers does not use
    return gqa_config(
        hf.with_values(config, {"num_key_value_heads": heads}),
        dtype,
        rope=rope_config(config, width // heads, theta_key="rotary_emb_base", partial=part),
        gated=False,
        activation=hf.activation(config, "hidden_act", "gelu"),
        norm="layer",
        **more,
    )
