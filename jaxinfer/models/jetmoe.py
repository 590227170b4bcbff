"""JetMoE: a mixture of attention heads, and one of networks, each with a bias of its sum.

Source: ``modeling_jetmoe`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_axes,
    experts_config,
    experts_per_token,
    router_specs,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs, with_mixers
from jaxinfer.models.params import ParamSpec, as_is, join, join_outputs
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, ExpertsConfig
from jaxinfer.nn.mixers.routed_spec import RoutedAttentionConfig
from jaxinfer.nn.placement import Fused
from pallas_kernels.route.routing import Routing

_TENSORS = ExpertTensors(router="mlp.router.layer")
_EPS = 1e-6  # of the layers' norms, whatever "rms_norm_eps" is, which is the final norm's


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    kv_heads, chosen = hf.positive_int(config, "num_key_value_heads"), experts_per_token(config)
    config.get("num_attention_heads")  # derived, also where it is given
    key = hf.first_of(config, "kv_channels", "head_dim")
    own = {
        "num_attention_heads": kv_heads * chosen,
        "hidden_act": config.get("activation_function"),
    }
    config = hf.with_values(config, own)
    experts = experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        routing=Routing(chosen, renormalised=True),
        bias="sum",
    )
    layers = hf.positive_int(config, "num_hidden_layers")
    decoder = gqa_config(
        config,
        dtype,
        head_dim=hf.positive_int(config, key, 128),
        ffns=[experts] * layers,
        tied=True,
        norm_eps=_EPS,
        final_norm_eps=hf.positive_float(config, "rms_norm_eps"),
    )
    attention = decoder.layers[0].mixer
    assert isinstance(attention, AttentionConfig)
    mixer = RoutedAttentionConfig(
        count=experts.count,
        chosen=chosen,
        num_kv_heads=kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        rope=attention.rope,
    )
    return with_mixers(decoder, dict.fromkeys(range(layers), mixer))


def join_inputs(*weights: np.ndarray) -> np.ndarray:  # [D, in_i] each -> [sum of in_i, D]
    """Matrices whose results are added, as one."""
    return join(*(weight.T for weight in weights))


def _split_inputs(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    ends = np.cumsum([source.own_shape[1] for source in sources])[:-1]
    return [part.T for part in np.split(array, ends)]


join_inputs.inverse = _split_inputs


def _attention_specs(
    path: str, source: str, c: RoutedAttentionConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.routed``."""
    del norm_dtype
    own, e, inner = f"{source}self_attention.", c.count, c.inner
    queries = tuple(
        Source(f"{own}experts.input_linear.weight", (e, inner, width), part=i) for i in range(e)
    )
    both = Source(f"{own}kv_proj.weight", (2 * inner, width))
    axis = Fused("heads", (inner,) * (e + 2), (c.num_kv_heads,) * (e + 2))
    array = ArraySpec((width, (e + 2) * inner), (None, axis))
    yield ParamSpec(f"{path}qkv", array, (*queries, both), join_outputs)
    router = (Source(f"{own}experts.router.layer.weight", (e, width)),)
    array = ArraySpec((width, e), (None, None))
    yield ParamSpec(f"{path}head_router", array, router, join_outputs)
    outputs = tuple(
        Source(f"{own}experts.output_linear.weight", (e, width, inner), part=i) for i in range(e)
    )
    axis = Fused("heads", (inner,) * e, (c.num_kv_heads,) * e)
    yield ParamSpec(f"{path}o", ArraySpec((e * inner, width), (axis, None)), outputs, join_inputs)
    bias = Source(f"{own}experts.bias", (width,))
    yield ParamSpec(f"{path}o_bias", ArraySpec((width,), (None,)), (bias,), as_is)


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts."""
    yield from router_specs(path, source, ffn, width, _TENSORS)
    e, f, axes = ffn.count, ffn.width, expert_axes(ffn)
    for name, tensor, shape, own_axes in (
        ("gate_up", "input_linear", (2 * f, width), axes.gate_up),
        ("down", "output_linear", (width, f), axes.down),
    ):
        stack = f"{source}mlp.{tensor}.weight"
        parts = tuple(Source(stack, (e, *shape), part=i) for i in range(e))
        array = ArraySpec((e, *shape), own_axes)
        yield ParamSpec(path + name, array, parts, as_is, pieces=e, matrix="experts")
    bias = Source(f"{source}mlp.bias", (width,))
    yield ParamSpec(f"{path}down_bias", ArraySpec((width,), (None,)), (bias,), as_is)


FAMILY = ModelFamily(
    name="jetmoe",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=_expert_specs, mixers=_attention_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
