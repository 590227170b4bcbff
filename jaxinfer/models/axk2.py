"""A.X K2 (SK Telecom): DeepSeek-V3.2's attention, with gates of norms and of heads' outputs.

Source: ``modeling_axk2`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import biased_experts, networks_by_layer
from jaxinfer.models.indexed_latent import indexed_config, indexed_param_specs
from jaxinfer.models.latent import LATENT_IGNORED_TENSORS
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.sources import Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig, LayerSpec
from jaxinfer.nn.ffn.gated_input_spec import GatedInputConfig
from jaxinfer.nn.mixers.indexed_latent_spec import IndexedLatentConfig

# transformers' defaults
_HEADS, _RANK = 16, 16  # of index_n_heads, gated_norm_rank
_DEFAULTS = MappingProxyType({"routed_scaling_factor": 2.5, "q_lora_rank": 384})
_NORMS = ("input_layernorm", "post_attention_layernorm")  # with a gate; the second before experts
_GATES: Mapping[str, str] = MappingProxyType({_NORMS[0]: "input_gate", _NORMS[1]: "ffn_gate"})


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "topk_method", "noaux_tc")
    if (config.get("n_group") is None) != (config.get("topk_group") is None):
        raise ConfigError(
            "config keys 'n_group' and 'topk_group' have to be set together; add the other one"
        )
    rank = hf.positive_int(config, "gated_norm_rank", _RANK)
    own = hf.with_defaults(config, {**_DEFAULTS, "mlp_layer_types": _network_kinds(config)})
    ffns = networks_by_layer(own, biased_experts(own), first=0)
    gates = {"input_gate": rank, "output_gate": True}
    decoder = indexed_config(own, dtype, heads=_HEADS, interleaved=False, ffns=ffns, **gates)
    layers: list[LayerSpec] = []
    for layer in decoder.layers:
        ffn = layer.ffn
        if isinstance(ffn, ExpertsConfig):
            ffn = GatedInputConfig(mixture=ffn, rank=rank)
        layers.append(replace(layer, ffn=ffn))
    return replace(decoder, layers=tuple(layers))


def _network_kinds(config: Mapping[str, Any]) -> list[str]:
    """The network of each layer if ``mlp_layer_types`` does not say it."""
    first = hf.layer_index(config, "first_k_dense_replace", 1)
    step = hf.positive_int(config, "moe_layer_freq", 1)
    layers = range(hf.positive_int(config, "num_hidden_layers"))
    return ["dense" if i < first or i % step else "sparse" for i in layers]


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters of the decoder, with Hugging Face's names of their sources."""
    plain = [replace(layer, ffn=layer.ffn.experts or layer.ffn) for layer in config.layers]
    specs = [*indexed_param_specs(replace(config, layers=tuple(plain)))]
    for i, layer in enumerate(config.layers):
        mixer, ffn, ranks = layer.mixer, layer.ffn, dict[str, int]()
        if isinstance(mixer, IndexedLatentConfig) and mixer.input_gate is not None:
            ranks[_NORMS[0]] = mixer.input_gate
        if isinstance(ffn, GatedInputConfig):
            ranks[_NORMS[1]] = ffn.rank
        specs = [_renamed(spec, f"layers_{i}/norms", ranks) for spec in specs]
        specs += _gate_specs(i, ranks, config.hidden_size)
    return tuple(specs)


def _renamed(spec: ParamSpec, path: str, norms: Iterable[str]) -> ParamSpec:
    """The spec, with the names of those of its norms that have gates."""
    if spec.path != path:
        return spec

    def own(source: Source) -> Source:
        start, _, kind = source.name.rpartition(".")
        has_gate = start.rpartition(".")[2] in norms
        return source._replace(name=f"{start}.norm.{kind}") if has_gate else source

    return replace(spec, sources=tuple(map(own, spec.sources)))


def _gate_specs(layer: int, ranks: Mapping[str, int], width: int) -> Iterator[ParamSpec]:
    """The matrices of the gates, which are small and not divided."""
    for norm, rank in ranks.items():
        name, axes = _GATES[norm], (None, None)
        gates = (
            Linear(f"{name}_in", (f"{norm}.W_down",), (width, rank), axes, bias=False),
            Linear(f"{name}_out", (f"{norm}.W_up",), (rank, width), axes, bias=False),
        )
        yield from linear_specs(f"layers_{layer}/", f"model.layers.{layer}.", gates)[0]


FAMILY = ModelFamily(
    name="axk2",
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    ignored_tensors=LATENT_IGNORED_TENSORS,
)
