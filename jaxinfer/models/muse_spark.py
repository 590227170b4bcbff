"""Muse Spark's text decoder: Muse Glimmer's attention with norms of heads' outputs, a stream that
blocks blend with their outputs, and experts of a latent whose outputs have a norm each.

Source: ``modeling_muse_spark`` of Hugging Face transformers. Tensors for images and sound are not
used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_specs,
    experts_config,
    experts_per_token,
    networks_by_layer,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources, gqa_param_specs
from jaxinfer.models.muse_parts import NAMES, POST_EPS, muse_config
from jaxinfer.models.params import ParamSpec, as_is, plus_one, stack_plus_one
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec
from jaxinfer.nn.layer_spec import ExpertNorms
from jaxinfer.nn.residual_spec import BlendedResidual
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _THETA, _QUERY_FACTOR, _LOGIT_FACTOR = 64, 500000.0, 5.4730064863875, 0.1767766952966369
_TEMPERATURE, _EXPERTS, _CHOSEN, _LATENT, _WIDTH = 0.3, 256, 8, 4096, 4096
_NORMS = NormSources(names=("input_layernorm", "pre_feedforward_layernorm"), several=stack_plus_one)
_TENSORS = ExpertTensors(
    latents=("mlp.pre_expert_proj", "mlp.post_expert_proj"),
    norms=("mlp.pre_expert_norm", "mlp.experts.post_expert_norm"),
)
_BLENDS = (
    ("mixer", "post_attention_residual_gate.gate"),
    ("ffn", "post_feedforward_residual_gate.gate"),
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    eps = hf.positive_float(config, "rms_norm_eps")
    post = hf.positive_float(config, "post_norm_eps", POST_EPS)
    own = hf.with_defaults(
        config,
        {
            "num_local_experts": _EXPERTS,
            "num_experts_per_tok": _CHOSEN,
            "moe_intermediate_size": _WIDTH,
        },
    )
    experts = experts_config(
        own,
        count="num_local_experts",
        width="moe_intermediate_size",
        routing=Routing(
            chosen=experts_per_token(own),
            scores="sigmoid",
            renormalised=True,
            scale=hf.positive_float(config, "routed_scaling_factor", 1.0),
            logit_scale=hf.positive_float(config, "output_multiplier", _LOGIT_FACTOR),
        ),
        choice_bias=True,
        latent=hf.positive_int(config, "moe_hidden_size", _LATENT),
        norms=ExpertNorms(eps, post),
    )
    return muse_config(
        own,
        dtype,
        head_dim=_HEAD_DIM,
        query_factor=_QUERY_FACTOR,
        logit_factor=_LOGIT_FACTOR,
        theta=_THETA,
        attention={"head_norm": eps},
        ffns=networks_by_layer(own, experts, first=0),
        norm_eps=eps,
        residual=BlendedResidual(
            temperature=hf.positive_float(config, "residual_gate_temperature", _TEMPERATURE),
            norm_eps=post,
        ),
    )


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with those of the stream."""
    experts = partial(expert_specs, names=_TENSORS)
    specs = [*gqa_param_specs(config, _NORMS, experts, NAMES)]
    for i in range(len(config.layers)):
        specs += _blends(f"layers_{i}/", NAMES.layer.format(i), config.hidden_size)
    return tuple(specs)


def _blends(path: str, source: str, width: int) -> Iterator[ParamSpec]:
    """The parameters of ``BlendedResidual`` in a layer."""
    array = ArraySpec((width,), (None,), jnp.dtype(jnp.float32))
    for block, name in _BLENDS:
        own = (Source(f"{source}{name}", array.shape),)
        yield ParamSpec(f"{path}{block}_residual/gate", array, own, as_is)
    own = (Source(f"{source}post_feedforward_layernorm.weight", array.shape),)
    yield ParamSpec(f"{path}ffn_residual/scale", array, own, plus_one)


FAMILY = ModelFamily(
    name="muse_spark",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=(
        *GQA_IGNORED_TENSORS,
        r"model\.(vision|audio)_\w+\..*",
    ),
    optional_prefix="model.language_model.",
    stacked_experts=True,
)
