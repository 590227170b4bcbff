"""gpt-oss: windows in every second layer, attention with sinks, experts with clamped SwiGLU.

Source: ``modeling_gpt_oss`` of Hugging Face transformers; the model card of gpt-oss-120b and
gpt-oss-20b (OpenAI 2025, arXiv:2508.10925). A layer's experts are stacked in one tensor, whose
outputs are of a gate and an up in turn; MXFP4 stores them by outputs, floats by inputs. A softmax
of the chosen logits is one of all logits, renormalised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.experts import (
    ExpertTensors,
    expert_axes,
    experts_config,
    experts_per_token,
    router_specs,
)
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, gqa_config, gqa_param_specs
from jaxinfer.models.hf_rope import rope_config, with_rope
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.params import ParamSpec, as_is, gates_first, transposed, transposed_gates_first
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from pallas_kernels.experts.stack import Activation
from pallas_kernels.route.routing import Routing

# transformers' defaults
_HEAD_DIM, _WINDOW, _THETA = 64, 128, 150000.0
_LIMIT, _ALPHA = 7.0, 1.702
_SHIFT = 1.0  # added to ups
_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)
_TENSORS = ExpertTensors(router="mlp.router")


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    chosen = experts_per_token(config)
    other = config.get("experts_per_token", chosen)  # an older name
    if other != chosen:
        raise ConfigError(
            f"config key 'experts_per_token' is {other!r} and 'num_experts_per_tok' {chosen}; make "
            "them equal"
        )
    config.get("hidden_act")  # the experts' is fixed
    experts = experts_config(
        config,
        count="num_local_experts",
        width="intermediate_size",
        routing=Routing(chosen, renormalised=True),
        activation=Activation(
            limit=hf.positive_float(config, "swiglu_limit", _LIMIT),
            alpha=hf.positive_float(config, "swiglu_alpha", _ALPHA),
            shift=_SHIFT,
        ),
        bias=True,
        router_bias=True,
    )
    bias = hf.flag(config, "attention_bias", True)
    head_dim = hf.positive_int(config, "head_dim", _HEAD_DIM)
    windows = _windows(config)
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        head_dim=head_dim,
        rope=rope_config(with_rope(config, _ROPE), head_dim, theta=_THETA),
        windows=windows,
        sinks=True,
        ffns=[experts] * len(windows),
    )


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer; by default the first, third, ... have one."""
    window = hf.positive_int(config, "sliding_window", _WINDOW)
    if config.get("layer_types") is not None:
        return windows_by_layer(config, window)
    num_layers = hf.positive_int(config, "num_hidden_layers")
    return tuple(None if i % 2 else window for i in range(num_layers))


def _expert_specs(path: str, source: str, ffn: ExpertsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts: a tensor for all gates and ups, one for all downs."""
    yield from router_specs(path, source, ffn, width, _TENSORS)
    e, f, stacks = ffn.count, ffn.width, f"{source}mlp.experts."
    axes = expert_axes(ffn)
    for name, shape, own_axes, is_pair in (
        ("gate_up", (2 * f, width), axes.gate_up, True),
        ("down", (width, f), axes.down, False),
    ):
        tensor, (outputs, inputs) = f"{stacks}{name}_proj", shape
        parts = tuple(Source(tensor, (e, inputs, outputs), part=i) for i in range(e))
        yield ParamSpec(
            path + name,
            ArraySpec((e, *shape), own_axes),
            parts,
            transposed_gates_first if is_pair else transposed,
            pieces=e,
            matrix="experts_in_out",
            interleaved=is_pair,
        )
        biases = tuple(Source(f"{tensor}_bias", (e, outputs), part=i) for i in range(e))
        yield ParamSpec(
            f"{path}{name}_bias",
            ArraySpec((e, outputs), own_axes[:2]),
            biases,
            gates_first if is_pair else as_is,
            pieces=e,
        )


FAMILY = ModelFamily(
    name="gpt_oss",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, experts=_expert_specs),
    ignored_tensors=GQA_IGNORED_TENSORS,
)
