"""Parts that Granite's families share: factors on embeddings, blocks' outputs, scores and logits,
and experts in two tensors a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.experts import ExpertTensors, expert_axes, router_specs
from jaxinfer.models.gqa import gqa_config
from jaxinfer.models.linears import dense_linears, linear_specs
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, join
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.decoder_config import DecoderSpec, ExpertsConfig
from jaxinfer.nn.residual_spec import PlainResidual

# of the network of all tokens
SHARED_NAMES = TensorNames(into=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_TENSORS = ExpertTensors(
    router="block_sparse_moe.router.layer",
    gate="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
)
SWA_TENSORS = ExpertTensors(
    router="block_sparse_moe.router",
    gate="block_sparse_moe.experts.gate_up_proj",
    down="block_sparse_moe.experts.down_proj",
)


def granite_config(
    config: Mapping[str, Any], dtype: jnp.dtype, *, bias: bool, **more: Any
) -> DecoderSpec:
    """A decoder with Granite's factors; ``more`` are further arguments of ``gqa_config``."""
    hf.supported_only(config, "normalization_function", "rmsnorm")
    return gqa_config(
        config,
        dtype,
        qkv_bias=bias,
        o_bias=bias,
        scale=hf.positive_float(config, "attention_multiplier", 1.0),
        embed_scale=hf.positive_float(config, "embedding_multiplier", 1.0),
        residual=PlainResidual(scale=hf.positive_float(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / hf.positive_float(config, "logits_scaling", 1.0),
        **more,
    )


def granite_expert_specs(
    path: str, source: str, ffn: ExpertsConfig, width: int, names: ExpertTensors = _TENSORS
) -> Iterator[ParamSpec]:
    """The parameters of a layer's experts: a tensor for all gates and ups, one for all downs; and
    those of the network of all tokens, if there is one.
    """
    yield from router_specs(path, source, ffn, width, names)
    axes = expert_axes(ffn)
    for name, tensor, shape, own_axes in (
        ("gate_up", names.gate, (2 * ffn.width, width), axes.gate_up),
        ("down", names.down, (width, ffn.width), axes.down),
    ):
        stack = (ffn.count, *shape)
        parts = tuple(Source(source + tensor, stack, part=i) for i in range(ffn.count))
        array = ArraySpec(stack, own_axes)
        yield ParamSpec(path + name, array, parts, join, pieces=ffn.count, matrix="experts")
    if ffn.shared is not None:
        linears = dense_linears(ffn.shared, width, names=SHARED_NAMES)
        yield from linear_specs(f"{path}shared/", source, linears)[0]
