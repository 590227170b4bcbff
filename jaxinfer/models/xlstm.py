"""xLSTM: layers of a matrix memory and a network.

Source: ``modeling_xlstm`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.models.state_space import LENGTH, LONGEST
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig, LayerSpec
from jaxinfer.nn.mixers.mlstm_spec import MlstmConfig
from jaxinfer.nn.placement import Fused

_EPS = 1e-6
_FIXED: tuple[tuple[str, Any], ...] = (
    *(("use_bias", False), ("add_out_norm", True), ("norm_reduction_force_float32", True)),
    *(("weight_mode", "single"), ("inference_state_dtype", "float32")),
)
_NAMES = TensorNames(
    embed="backbone.embeddings",
    layer="backbone.blocks.{}.",
    final_norm="backbone.out_norm",
    into=("ffn.proj_up_gate", "ffn.proj_up"),
    down="ffn.proj_down",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in _FIXED:
        hf.supported_only(config, key, only)
    config.get("tie_word_embeddings")
    width = hf.positive_int(config, hf.first_of(config, "hidden_size", "embedding_dim"))
    # of two numbers transformers takes that of blocks
    key = "num_hidden_layers" if config.get("num_blocks") is None else "num_blocks"
    eps, factor = (
        hf.positive_float(config, key, default)
        for key, default in (("norm_eps", _EPS), ("ffn_proj_factor", 2.667))
    )
    unit = hf.positive_int(config, "ffn_round_up_to_multiple_of", 64)
    hidden = int((width * factor + unit - 1) // unit * unit)
    ffn = FeedForwardConfig(width=hidden, activation="silu", gated=True)
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=width,
        layers=(LayerSpec(_mixer(config, width, eps), ffn),) * hf.positive_int(config, key),
        lengths=(LENGTH, LONGEST),
        norm="rms",
        norm_eps=eps,
        tie_word_embeddings=False,  # as transformers, whatever its key is
        dtype=dtype,
        logit_cap=hf.positive_float(config, "output_logit_soft_cap", 30.0),
    )


def _mixer(config: Mapping[str, Any], width: int, norm_eps: float) -> MlstmConfig:
    """The matrix memory of a layer."""
    heads = hf.positive_int(config, "num_heads", 8)
    sizes: list[int] = []
    for key, default in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0)):
        size = int(width * hf.positive_float(config, key, default))
        if not size or size % heads:
            raise ConfigError(
                f"config key {key!r} gives {size} components, which 'num_heads' {heads} does not "
                "divide; correct one of them"
            )
        sizes.append(size // heads)
    return MlstmConfig(
        num_heads=heads,
        key_dim=sizes[0],
        value_dim=sizes[1],
        gate_cap=hf.positive_float(config, "gate_soft_cap", 15.0),
        eps=hf.positive_float(config, "eps", _EPS),
        norm_eps=norm_eps,
    )


def _mixer_specs(
    path: str, source: str, c: MlstmConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.mlstm``."""
    own, values = f"{source}mlstm_layer.", c.num_heads * c.value_dim
    gates = Fused("heads", (c.num_heads, c.num_heads), (c.num_heads, c.num_heads))
    linears = (
        Linear(
            "qkvz",
            ("q", "k", "v", "ogate_preact"),
            (width, sum(c.projected.widths)),
            (None, c.projected),
            bias=False,
        ),
        Linear(
            "gates", ("igate_preact", "fgate_preact"), (width, 2 * c.num_heads), (None, gates), True
        ),
        Linear("o", ("out_proj",), (values, width), ("heads", None), bias=False),
    )
    weights, biases = linear_specs(path, own, linears)
    yield from (*weights, *biases)
    norm = (Source(f"{own}multihead_norm.weight", (values,)),)
    yield ParamSpec(f"{path}head_norm", ArraySpec((values,), ("heads",), norm_dtype), norm, as_is)


FAMILY = ModelFamily(
    name="xlstm",
    config_from_hf=config_from_hf,
    param_specs=partial(
        gqa_param_specs,
        norms=NormSources(("norm_mlstm", "norm_ffn")),
        names=_NAMES,
        mixers=_mixer_specs,
    ),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
