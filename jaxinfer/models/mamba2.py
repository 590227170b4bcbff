"""Mamba-2: a decoder of state spaces alone, whose layers have no network.

Source: ``modeling_mamba2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.mamba import Mamba2Keys, mamba2_config, mamba2_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.nn.absent import NoNetwork
from jaxinfer.nn.decoder_config import DecoderSpec, LayerSpec, MixerSpec

NAMES = TensorNames(
    embed="backbone.embeddings", layer="backbone.layers.{}.", final_norm="backbone.norm_f"
)
_KEYS = Mamba2Keys(
    heads="num_heads",
    head_dim="head_dim",
    state="state_size",
    groups="n_groups",
    taps="conv_kernel",
    expand="expand",
    conv_bias="use_conv_bias",
    bias="use_bias",
    norm_eps="layer_norm_epsilon",
    chunk="chunk_size",
)
# Of training, and of kernels. Published files of Mamba-2 have true for the last one, and their
# norms follow the gates nevertheless, as in transformers.
_UNUSED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_scale", "fused_add_norm"),
    "norm_before_gate",
)
LENGTH = 8192  # no key says how long a context may be; prompts of training had some thousand tokens
_LONGEST = 1 << 20


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "hidden_act", "silu", "swish")
    mamba = mamba2_config(config, _KEYS, heads=128, state=128, groups=8)
    return state_space_decoder(config, dtype, mamba, tied=False)


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
        lengths=(LENGTH, _LONGEST),
        norm="rms",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", tied),
        dtype=dtype,
    )


FAMILY = ModelFamily(
    name="mamba2",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("norm",)),
        names=NAMES,
        mixers=partial(mamba2_specs, name="mixer."),
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
