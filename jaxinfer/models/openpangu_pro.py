"""openPangu Pro MoE v2 (Huawei): attention to keys and values that are parameters, and experts.

Source: vLLM's ``openpangu.py``, which Huawei contributed; transformers has no class of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gqa import (
    GQA_IGNORED_TENSORS,
    NormSources,
    gqa_config,
    gqa_param_specs,
    with_mixers,
)
from jaxinfer.models.hf_keys import REMOVE_KEY
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.openpangu_parts import EXPERTS, NORMS, networks
from jaxinfer.models.params import ParamSpec, as_is
from jaxinfer.models.sources import ArraySpec, RotaryRows, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec
from jaxinfer.nn.mixers.key_sinks_spec import KeySinksConfig
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.rope import RopeConfig

_BASE = 10000.0  # in vLLM whatever "rope_theta" says
_ABSENT = ("rope_scaling", "rope_parameters", "interleaved_sliding_window")
_UNUSED = ("param_sink_scalar", "param_sink_of_head_dim")  # which vLLM reads, and does not use


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "rope_theta", _BASE)
    for key in _ABSENT:
        if config.get(key) is not None:
            raise ConfigError(
                f"config key {key!r} is {short(config[key])}, which this family does not support; "
                f"{REMOVE_KEY}"
            )
    for unused in _UNUSED:
        config.get(unused)
    flat, turned = (hf.positive_int(config, key) for key in ("qk_nope_dim", "qk_rope_dim"))
    value_dim = hf.positive_int(config, "v_channels")
    if value_dim > flat + turned:
        raise ConfigError(
            f"config key 'v_channels' is {value_dim}, and values that are wider than keys "
            f"('qk_nope_dim' and 'qk_rope_dim', {flat + turned}) are not supported"
        )
    bias = any([hf.flag(config, name, False) for name in ("attention_bias", "bias")])
    decoder = gqa_config(
        hf.with_values(config, {"head_dim": flat + turned}),
        dtype,
        qkv_bias=hf.flag(config, "qkv_bias", bias),
        o_bias=bias,
        rope=RopeConfig(flat + turned, _BASE, None, turned),
        ffns=networks(config, hf.positive_int(config, "num_hidden_layers")),
        norms="both" if hf.flag(config, "sandwich_norm", False) else "before",
        attention={"own_value_dim": value_dim},
    )
    attention = decoder.layers[0].mixer
    assert isinstance(attention, AttentionConfig), "all layers are alike"
    mixer = KeySinksConfig(
        attention=attention,
        count=hf.positive_int(config, "param_sink_number"),
        with_values=hf.flag(config, "param_sink_with_value", False),
        norm_eps=decoder.norm_eps,
    )
    return with_mixers(decoder, dict.fromkeys(range(len(decoder.layers)), mixer))


@dataclass(frozen=True)
class _Flat:
    """Parameters [S, K, W] as rows [S, K * W], with components of heads in the kernels' order."""

    order: RotaryRows | None = None

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        """The rows."""
        flat = tensor.reshape(len(tensor), -1)
        return flat if self.order is None else flat[:, self.order.order(flat.shape[1])]

    def inverse(self, array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
        """The tensor of an array."""
        if self.order is not None:
            array = array[:, np.argsort(self.order.order(array.shape[1]))]
        return [array.reshape(sources[0].shape)]


def _mixer_specs(
    path: str, source: str, mixer: KeySinksConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.key_sinks``."""
    c, own = mixer.attention, f"{source}self_attn."
    n, k, h, v = c.num_heads, c.num_kv_heads, c.head_dim, c.value_dim
    assert c.rope is not None, "all layers rotate"
    rows = partial(RotaryRows, head_dim=h, rotated=c.rope.width, interleaved=True)
    parts = (n * h, k * h, k * v)
    qkv = Linear(
        "qkv",
        ("self_attn.qkv_proj",),
        (width, sum(parts)),
        (None, Fused("heads", parts, (n, k, k))),
        c.qkv_bias,
        rows=(rows(n + k),),
    )
    o = Linear("o", ("self_attn.o_proj",), (n * v, width), ("heads", None), c.o_bias)
    for specs in linear_specs(path, source, (qkv, o)):
        yield from specs
    norm = (Source(f"{own}k_layernorm.weight", (h,), rows=rows(1)),)
    yield ParamSpec(f"{path}k_norm", ArraySpec((h,), (None,), norm_dtype), norm, as_is)
    sinks = (("key", h, _Flat(rows(k))), ("value", v, _Flat()))
    for name, size, build in sinks if mixer.with_values else sinks[:1]:
        array = ArraySpec((mixer.count, k * size), (None, Fused("heads", (k * size,), (k,))))
        stored = (Source(f"{own}param_sink_{name}", (mixer.count, k, size)),)
        yield ParamSpec(f"{path}sink_{name}s", array, stored, build)


def _param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the norms after blocks if there are any."""
    both = config.layers[0].norms == "both"
    norms = NormSources(names=NORMS) if both else NormSources()
    return gqa_param_specs(config, norms, EXPERTS, mixers=_mixer_specs)


FAMILY = ModelFamily(
    name="openpangu_pro",
    config_from_hf=config_from_hf,
    param_specs=_param_specs,
    ignored_tensors=GQA_IGNORED_TENSORS,
)
