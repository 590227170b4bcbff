"""Decoders whose layers are a state space alone, without networks: Mamba and Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.absent import NoNetwork
from jaxinfer.nn.decoder_config import DecoderSpec, LayerSpec, MixerSpec

NAMES = TensorNames(
    embed="backbone.embeddings", layer="backbone.layers.{}.", final_norm="backbone.norm_f"
)
# Of training, and of kernels. Published files of Mamba-2 have true for the last one, and their
# norms follow the gates nevertheless, as in transformers.
_UNUSED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_scale", "fused_add_norm"),
    "norm_before_gate",
)
LENGTH = 8192  # no key says how long a context may be; prompts of training had some thousand tokens
LONGEST = 1 << 20


def state_space_decoder(
    config: Mapping[str, Any], dtype: jnp.dtype, mixer: MixerSpec, *, tied: bool
) -> DecoderSpec:
    """A decoder whose layers have this mixer alone; ``tied`` is the default of a key."""
    hf.supported_only(config, "rms_norm", True)
    for unused in _UNUSED:
        config.get(unused)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hf.positive_int(config, "hidden_size"),
        layers=(LayerSpec(mixer, NoNetwork(), "shared"),) * num_layers,
        lengths=(LENGTH, LONGEST),
        norm="rms",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", tied),
        dtype=dtype,
    )
