"""Llama 4's text decoder: experts whose inputs are weighted, layers without rope.

Source: ``modeling_llama4`` of Hugging Face transformers. Layers that rotate attend within chunks of
``attention_chunk_size`` tokens. Heads that rotate are normalised without weights, queries of the
others grow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_axes,
    experts_config,
    gated_network,
    router_specs,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.layer_kinds import rotating_layers
from jaxinfer.models.linears import dense_linears, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.block import QueryGrowth
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    FeedForwardSpec,
)
from jaxinfer.nn.state import Chunk
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _THETA = 128, 5e5
_CHUNK, _FLOOR, _GROWTH = 8192, 8192, 0.1
_CHUNKED = "chunked_attention"
_TENSORS = ExpertTensors(router="feed_forward.router", shared="feed_forward.shared_expert.")
_NAMES = TensorNames(
    into=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    rotates = rotating_layers(config)
    chunks = _chunks(config, rotates)
    bias, growth = hf.flag(config, "attention_bias", False), None
    beta = hf.positive_float(config, "attn_scale", _GROWTH)
    original = hf.positive_int(config, "floor_scale", _FLOOR)
    tuned = config.get("attn_temperature_tuning")
    if tuned == 4 or hf.flag(config, "attn_temperature_tuning", True):  # 4: of the first files
        growth = QueryGrowth(beta, original, offset=1)
    decoder = gqa_config(
        config,
        dtype,
        windows=(None,) * len(rotates),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="rotated_plain" if hf.flag(config, "use_qk_norm", True) else None,
        head_dim=hf.positive_int(config, "head_dim", _HEAD_DIM),
        theta=_THETA,
        rotates=rotates,
        ffns=_networks(config, len(rotates)),
    )
    layers = []
    for layer, chunk in zip(decoder.layers, chunks, strict=True):
        assert isinstance(layer.mixer, AttentionConfig)
        own = {} if layer.mixer.rope else {"qk_norm": None, "growth": growth}
        layers.append(replace(layer, mixer=replace(layer.mixer, chunk=chunk, **own)))
    return replace(decoder, layers=tuple(layers))


def _chunks(config: Mapping[str, Any], rotates: list[bool]) -> list[Chunk | None]:
    """The chunk of each layer: of those that rotate, unless ``layer_types`` names others."""
    size = None
    if config.get("attention_chunk_size", _CHUNK) is not None:
        size = Chunk(hf.positive_int(config, "attention_chunk_size", _CHUNK))
    kinds = hf.layer_kinds(config, "layer_types", len(rotates), ("full_attention", _CHUNKED))
    if kinds is None:
        return [size if one else None for one in rotates]
    if size is None and _CHUNKED in kinds:
        raise ConfigError(
            f"config key 'layer_types' holds {_CHUNKED!r}, but 'attention_chunk_size' is null"
        )
    return [size if kind == _CHUNKED else None for kind in kinds]


def _networks(config: Mapping[str, Any], num_layers: int) -> list[FeedForwardSpec]:
    """The network of each layer: experts in ``moe_layers``, or in every so many layers."""
    config.get("router_jitter_noise")  # in training
    step = hf.positive_int(config, "interleave_moe_layer_step", 1)
    sparse, known = config.get("moe_layers"), range(num_layers)
    if sparse is None:
        sparse = [*range(step - 1, num_layers, step)]
    listed = sparse if isinstance(sparse, list) else [None]
    if len(listed) > num_layers or not all(type(one) is int and one in known for one in listed):
        raise ConfigError(
            f"config key 'moe_layers' must be a list of layers below {num_layers}, got "
            f"{short(sparse)}"
        )
    width = hf.positive_int(config, "intermediate_size")
    experts = experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        routing=Routing(hf.positive_int(config, "num_experts_per_tok", 1), "sigmoid"),
        weighs_inputs=True,
        shared=gated_network(config, width),
    )
    wide = hf.positive_int(config, "intermediate_size_mlp", 2 * width)
    dense = gated_network(config, wide)
    return [experts if i in listed else dense for i in known]


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts: a tensor for all gates and ups, one for all downs."""
    yield from router_specs(path, source, ffn, width, _TENSORS)
    axes, e = expert_axes(ffn), ffn.count
    for name, outputs, inputs, own_axes in (
        ("gate_up", 2 * ffn.width, width, axes.gate_up),
        ("down", width, ffn.width, axes.down),
    ):
        tensor = f"{source}feed_forward.experts.{name}_proj"
        parts = tuple(Source(tensor, (e, inputs, outputs), part=i) for i in range(e))
        array = ArraySpec((e, outputs, inputs), own_axes)
        yield ParamSpec(path + name, array, parts, transposed, pieces=e, matrix="experts_in_out")
    assert ffn.shared is not None
    linears = dense_linears(ffn.shared, width, _TENSORS.shared)
    yield from linear_specs(f"{path}shared/", source, linears)[0]


FAMILY = ModelFamily(
    name="llama4",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, names=_NAMES, interleaved=True, experts=_expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
