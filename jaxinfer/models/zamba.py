"""Zamba: Mamba with several heads, in some layers after one block of attention and a network.

Source: ``modeling_zamba`` of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS
from jaxinfer.models.linears import Linear, conv_specs, linear_specs
from jaxinfer.models.mamba import HYBRID_KEYS, mamba_config
from jaxinfer.models.names import TensorNames
from jaxinfer.models.params import ParamSpec, stack_flat
from jaxinfer.models.sources import ArraySpec, PackedHeads, Source
from jaxinfer.models.zamba_parts import (
    HYBRID,
    MAMBA,
    attention_config,
    block_count,
    kinds,
    zamba_decoder,
    zamba_specs,
)
from jaxinfer.nn.decoder_config import DecoderSpec, FeedForwardConfig
from jaxinfer.nn.mixers.after_block_spec import AfterBlockConfig
from jaxinfer.nn.mixers.mamba_spec import MambaConfig
from jaxinfer.nn.placement import Fused

# Of other programs, and of the first values in training.
_UNUSED = (
    *("use_mamba_kernels", "use_associative_scan"),
    *("time_step_min", "time_step_max", "time_step_floor"),
)
# transformers' defaults
_HEADS, _PERIOD, _OFFSET, _FIRST = 2, 6, 4, 3
_FLOAT32 = jnp.dtype(jnp.float32)
_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    into=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    for key in _UNUSED:
        config.get(key)
    width, heads = (hf.positive_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    hf.supported_only(config, "attention_hidden_size", 2 * width)
    key = hf.first_of(config, "attention_head_dim", "head_dim")
    attention = attention_config(
        config, hf.positive_int(config, key, 2 * width // heads), rotates=False
    )
    network = FeedForwardConfig(
        width=hf.positive_int(config, "intermediate_size"),
        activation=hf.activation(config, "hidden_act", "gelu"),
        gated=True,
    )
    mamba, mixers, uses, hybrids = _mamba(config), list[Any](), 0, kinds(config, _kinds(config))
    count = block_count(config, 1, sum(hybrids))
    for hybrid in hybrids:
        block = AfterBlockConfig(
            block=uses % count, attention=attention, network=network, other=mamba
        )
        mixers.append(block if hybrid else mamba)
        uses += hybrid
    return zamba_decoder(config, dtype, mixers, count)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds of layers that a period names, behind the first three."""
    period = hf.positive_int(config, "attn_layer_period", _PERIOD)
    offset = hf.layer_index(config, "attn_layer_offset", _OFFSET)
    rest = range(hf.positive_int(config, "num_hidden_layers") - _FIRST)
    own = [HYBRID if i % period == offset else MAMBA[0] for i in rest]
    return [*MAMBA[:1] * (_FIRST - 1), HYBRID, *own]


def _mamba(config: Mapping[str, Any]) -> MambaConfig:
    """The mixer of every layer."""
    hf.supported_only(config, "hidden_mamba_act", "silu", "swish")
    num_heads = hf.positive_int(config, "n_mamba_heads", _HEADS)
    own = hf.with_values(config, {"hidden_act": "silu"})  # which is that of the network
    mamba = mamba_config(own, HYBRID_KEYS, rank="mamba_dt_rank", inner=None, num_heads=num_heads)
    if mamba.inner % num_heads:
        raise ConfigError(
            f"config key 'n_mamba_heads' is {num_heads}, and must divide {mamba.inner}, the width "
            "of the mixer"
        )
    return mamba


def _mamba_specs(
    path: str, source: str, c: MambaConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.mamba``; tensors have a dimension of heads."""
    del norm_dtype
    assert (h := c.num_heads) is not None
    own, inner, n = f"{source}mamba.", c.inner, c.state_dim
    each, both = inner // h, Fused("heads", (inner, inner))
    order = (PackedHeads(inner, (1, 1)),)  # a channel's input and its gate are adjacent
    linears = (
        Linear("into", ("in_proj",), (width, 2 * inner), (None, both), c.bias, order),
        Linear("o", ("out_proj",), (inner, width), ("heads", None), c.bias),
    )
    weights, biases = linear_specs(path, own, linears)
    yield from (*weights, *biases)
    into = Source(f"{own}x_proj_weight", (h, c.rank + 2 * n, each))
    array = ArraySpec((inner, c.rank + 2 * n), ("heads", None))
    yield ParamSpec(f"{path}x", array, (into,), _of_inputs)
    steps = Source(f"{own}dt_proj_weight", (h, each, c.rank))
    yield ParamSpec(f"{path}dt", ArraySpec((c.rank, inner), (None, "heads")), (steps,), _of_outputs)
    yield from conv_specs(path, f"{own}conv1d", (c.conv_width, inner), "heads", bias=c.conv_bias)
    rates = Source(f"{own}A_log", (h, each, n))
    array = ArraySpec((inner, n), ("heads", None), _FLOAT32)
    yield ParamSpec(f"{path}rates", array, (rates,), _of_channels)
    decay = tuple(Source(f"{own}{one}", (h, each)) for one in ("dt_proj_bias", "D"))
    array = ArraySpec((2, inner), (None, "heads"), _FLOAT32)
    yield ParamSpec(f"{path}decay", array, decay, stack_flat)


def _of_channels(tensor: np.ndarray) -> np.ndarray:  # [H, P, X] -> [H * P, X]
    return tensor.reshape(-1, tensor.shape[2])


def _of_inputs(tensor: np.ndarray) -> np.ndarray:  # [H, X, P] -> [H * P, X]
    return _of_channels(tensor.swapaxes(1, 2))


def _of_outputs(tensor: np.ndarray) -> np.ndarray:  # [H, P, X] -> [X, H * P]
    return _of_channels(tensor).T


def _as_tensor(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    return [array.reshape(sources[0].shape)]


def _from_inputs(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    h, _, each = sources[0].shape
    return [array.reshape(h, each, -1).swapaxes(1, 2)]


_of_channels.inverse = _as_tensor
_of_inputs.inverse = _from_inputs
_of_outputs.inverse = lambda array, sources: _as_tensor(array.T, sources)


FAMILY = ModelFamily(
    name="zamba",
    config_from_hf=config_from_hf,
    param_specs=partial(zamba_specs, block="shared_transf", names=_NAMES, mixers=_mamba_specs),
    # where the block is stored with every layer that uses it
    ignored_tensors=(*GQA_IGNORED_TENSORS, r"model\.layers\.\d+\.shared_transf\..*"),
)
