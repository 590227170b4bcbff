"""ZAYA: attention after convolutions, experts by states that routers pass on, one of them empty.

Source: ``modeling_zaya`` of Hugging Face transformers. There the residual stream is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import ExpertTensors, expert_specs, experts_config
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.hf_rope import SECTIONS, ropes_by_kind
from jaxinfer.models.layer_kinds import sliding_window, windows_by_layer
from jaxinfer.models.linears import Linear, conv_specs, linear_specs
from jaxinfer.models.names import LLAMA
from jaxinfer.models.params import ParamSpec, as_is, stack, transposed
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec
from jaxinfer.nn.ffn.router_states_spec import ExpertsByStatesConfig, StatesResidual
from jaxinfer.nn.mixers.convolved_spec import ConvolvedAttentionConfig
from jaxinfer.nn.placement import Fused
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _KV_HEADS, _TAPS, _ROUTER = 128, 2, 2, 256
_THETA, _LOCAL_THETA, _ROTATED = 5e6, 1e4, 0.5
_KINDS = MappingProxyType({"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"})
_TENSORS = ExpertTensors(
    router="mlp.gate.router_mlp.out_proj", choice_bias="mlp.gate.balancing_biases"
)
_FACTORS = ("hidden_states_bias", "hidden_states_scale", "residual_bias", "residual_scale")
_BLOCKS = MappingProxyType(
    {
        "mixer_residual": "post_attention_residual_scale",
        "ffn_residual": "post_mlp_residual_scale",
    }
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key, only in (("attention_bias", False), ("num_experts_per_tok", 1), ("cca_time1", 2)):
        hf.supported_only(config, key, only)
    taps = hf.positive_int(config, "cca_time0", _TAPS)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = hf.layer_kinds(config, "layer_types", num_layers, tuple(_KINDS))
    own: dict[str, Any] = {"layer_types": kinds and [_KINDS[kind] for kind in kinds]}
    own |= {place: _renamed(config.get(place)) for place in SECTIONS}
    own["num_key_value_heads"] = hf.positive_int(config, "num_key_value_heads", _KV_HEADS)
    config = hf.with_values(config, own)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    rope, local = ropes_by_kind(
        config,
        head_dim,
        theta=_THETA,
        local_theta=_LOCAL_THETA,
        partials=(_ROTATED, _ROTATED) if own[SECTIONS[1]] is None else (1.0, 1.0),
    )
    decoder = gqa_config(
        config,
        dtype,
        head_dim=head_dim,
        windows=windows_by_layer(config, sliding_window(config, None) if kinds else None),
        rope=rope,
        local_rope=local,
        tied=True,
        ffns=[_network(config, i > 0) for i in range(num_layers)],
        residual=StatesResidual(),
        head_bias=hf.flag(config, "lm_head_bias", False),
    )
    mixers: dict[int, ConvolvedAttentionConfig] = {}
    for i, layer in enumerate(decoder.layers):
        assert isinstance(layer.mixer, AttentionConfig)
        mixers[i] = ConvolvedAttentionConfig(attention=layer.mixer, conv_width=taps)
    return with_mixers(decoder, mixers)


def _renamed(section: Any) -> Any:
    """A rope section with the common names of kinds of layers, and without a kind of its own."""
    if not isinstance(section, Mapping) or not any(kind in section for kind in _KINDS):
        return section
    return {_KINDS.get(key, key): s for key, s in section.items() if key != "rope_type"}


def _network(config: Mapping[str, Any], adds: bool) -> ExpertsByStatesConfig:
    """The experts of a layer; one more does nothing."""
    width = hf.positive_int(config, "router_hidden_size", _ROUTER)
    if width > hf.positive_int(config, "hidden_size"):
        raise ConfigError(
            f"config key 'router_hidden_size' is {short(width)}, and at most 'hidden_size' is "
            "supported; use another model"
        )
    mixture = experts_config(
        config,
        count="num_experts",
        width="moe_intermediate_size",
        routing=Routing(1),
        choice_bias=True,
        zero_experts=1,
        zero_keeps=False,
    )
    return ExpertsByStatesConfig(mixture=mixture, width=width, adds=adds)


def _attention_specs(
    path: str, source: str, c: ConvolvedAttentionConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.convolved``."""
    del norm_dtype
    a, own = c.attention, f"{source}self_attn.qkv_proj."
    n, k, h = a.num_heads, a.num_kv_heads, a.head_dim
    parts = (n * h, k * h, c.delayed, c.delayed)
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    linears = (
        Linear("qkv", names, (width, sum(parts)), (None, Fused("heads", parts)), bias=False),
    )
    yield from linear_specs(path, own, linears)[0]
    o = Linear("o", (LLAMA.o,), (n * h, width), ("heads", None), bias=False)
    yield from linear_specs(path, source, (o,))[0]
    channels = c.channels
    yield from conv_specs(
        path, f"{own}conv_qk_depthwise", (c.conv_width, channels), "heads", bias=True
    )
    taps = (Source(f"{own}conv_qk_grouped.weight", (channels, h, 2)),)
    array = ArraySpec((n + k, 2 * h, h), ("heads", None, None))
    yield ParamSpec(f"{path}heads_conv", array, taps, _taps_of_heads)
    for name, tensor, size in (
        ("heads_conv_bias", "qkv_proj.conv_qk_grouped.bias", channels),
        ("key_scale", "qk_norm.temp", k),
    ):
        one = (Source(f"{source}self_attn.{tensor}", (size,)),)
        yield ParamSpec(path + name, ArraySpec((size,), ("heads",)), one, as_is)


def _taps_of_heads(weights: np.ndarray) -> np.ndarray:  # [C, H, 2] -> [N + K, 2H, H]
    """The taps of whole heads, as a matrix of each."""
    _, width, taps = weights.shape
    of_heads = weights.reshape(-1, width, width, taps)  # [N + K, output, input, tap]
    return of_heads.transpose(0, 3, 2, 1).reshape(-1, taps * width, width)


def _tensor_of_taps(array: np.ndarray, _: Sequence[Source]) -> list[np.ndarray]:
    """The inverse of ``_taps_of_heads``."""
    heads, inputs, width = array.shape
    of_heads = array.reshape(heads, -1, width, width)  # [N + K, tap, input, output]
    return [of_heads.transpose(0, 3, 2, 1).reshape(heads * width, width, inputs // width)]


_taps_of_heads.inverse = _tensor_of_taps  # type: ignore[attr-defined]


def _network_specs(
    path: str, source: str, ffn: ExpertsByStatesConfig, width: int
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.ffn.router_states`` within those of a layer."""
    own, r = f"{source}mlp.gate.", ffn.width
    for name, tensor, inputs in (
        ("router_in", "down_proj", width),
        ("router_first", "router_mlp.fc1", r),
        ("router_second", "router_mlp.fc2", r),
    ):
        matrix, bias = (
            Source(f"{own}{tensor}.weight", (r, inputs)),
            Source(f"{own}{tensor}.bias", (r,)),
        )
        yield ParamSpec(path + name, ArraySpec((inputs, r), (None, None)), (matrix,), transposed)
        yield ParamSpec(f"{path}{name}_bias", ArraySpec((r,), (None,)), (bias,), as_is)
    vectors = {"router_norm": "router_mlp.norm.weight"}
    vectors |= {"router_scale": "router_states_scale"} if ffn.adds else {}
    for name, tensor in vectors.items():
        one = (Source(own + tensor, (r,)),)
        yield ParamSpec(path + name, ArraySpec((r,), (None,)), one, as_is)
    yield from expert_specs(path, source, ffn.mixture, width, _TENSORS, routed=r)


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the biases and factors of the stream."""
    specs = [*gqa_param_specs(config, mixers=_attention_specs, experts=_network_specs)]
    d = config.hidden_size
    sources = {"residual": [f"model.input_{name}" for name in _FACTORS[:2]]}
    for i in range(len(config.layers)):
        for name, tensor in _BLOCKS.items():
            start = f"{LLAMA.layer.format(i)}{tensor}."
            sources[f"layers_{i}/{name}"] = [start + one for one in _FACTORS]
    for path, names in sources.items():
        array = ArraySpec((len(names), d), (None, None))
        own = tuple(Source(name, (d,)) for name in names)
        specs.append(ParamSpec(f"{path}/factors", array, own, stack))
    return tuple(specs)


FAMILY = ModelFamily(
    name="zaya",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
    stacked_experts=True,
)
