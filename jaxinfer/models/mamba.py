"""Config keys and checkpoint tensors of mixers of Mamba and of Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxinfer.core.checks import short
from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.linears import Linear, conv_specs, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, join, stack
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.mixers.mamba2_spec import Mamba2Config
from jaxinfer.nn.mixers.mamba_spec import MambaConfig
from jaxinfer.nn.placement import Fused

_FLOAT32 = jnp.dtype(jnp.float32)
# transformers' names, and those of older files
ATTENTION, MAMBA = ("full_attention", "attention"), ("linear_attention", "mamba")
_DEFAULT_LIMIT = (0.0, math.inf)


class MambaKeys(NamedTuple):
    """The keys of a mixer's sizes, by default those of Mamba and Mamba-2."""

    state: str = "state_size"
    taps: str = "conv_kernel"
    expand: str = "expand"
    bias: str = "use_bias"
    conv_bias: str = "use_conv_bias"


# the keys of decoders that have attention, too
HYBRID_KEYS = MambaKeys(
    "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_proj_bias", "mamba_conv_bias"
)


class Mamba2Keys(NamedTuple):
    """The further keys of Mamba-2, by default those of decoders that have attention, too."""

    sizes: MambaKeys = HYBRID_KEYS
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    limit: str = "time_step_limit"
    norm_eps: str = "rms_norm_eps"
    chunk: str = "mamba_chunk_size"  # how many tokens other programs compute at a time


MAMBA2_KEYS = Mamba2Keys(
    sizes=MambaKeys(),
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    norm_eps="layer_norm_epsilon",
    chunk="chunk_size",
)
_MAMBA_KEYS, _HYBRID_MAMBA2 = MambaKeys(), Mamba2Keys()


def mamba2_config(
    config: Mapping[str, Any],
    keys: Mamba2Keys = _HYBRID_MAMBA2,
    *,
    inner: int | None = None,
    heads: int = 128,
    state: int = 256,
    groups: int = 1,
    **more: Any,
) -> Mamba2Config:
    """The mixer of a config; ``inner`` is its width where it is not ``expand`` times the stream's.

    The numbers are transformers' defaults, ``more`` are further fields. Raises ``ConfigError`` for
    sizes that do not fit together.
    """
    num_heads = hf.positive_int(config, keys.heads, heads)
    expanded, given = _expanded(config, keys.sizes), config.get(keys.head_dim)
    width = inner or expanded
    head_dim = width // num_heads if given in (None, "auto") else 0
    head_dim = head_dim or hf.positive_int(config, keys.head_dim)
    if num_heads * head_dim != width:
        raise ConfigError(
            f"config key {keys.heads!r} {num_heads} times {keys.head_dim!r} {head_dim} is not "
            f"{width}, the width of the mixer; correct one of them"
        )
    num_groups = hf.positive_int(config, keys.groups, groups)
    if num_heads % num_groups:
        raise ConfigError(
            f"config key {keys.heads!r} {num_heads} is not a multiple of {keys.groups!r} "
            f"{num_groups}"
        )
    config.get(keys.chunk)
    bias = hf.flag(config, keys.sizes.bias, False)
    fields: dict[str, Any] = {"into_bias": bias, "o_bias": bias, "norm_groups": num_groups}
    fields |= {"step_limit": _limit(config, keys.limit), **more}
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        norm_eps=hf.positive_float(config, keys.norm_eps, 1e-5),
        **_states_and_taps(config, keys.sizes, state),
        **fields,
    )


def _expanded(config: Mapping[str, Any], keys: MambaKeys) -> int:
    """The width of a mixer that is a multiple of the stream's."""
    factor = hf.positive_float(config, keys.expand, 2)
    return int(factor * hf.positive_int(config, "hidden_size"))


def _states_and_taps(config: Mapping[str, Any], keys: MambaKeys, state: int) -> dict[str, Any]:
    """The fields of states and of the convolution; ``state`` is the default of their width."""
    return {
        "state_dim": hf.positive_int(config, keys.state, state),
        "conv_width": hf.positive_int(config, keys.taps, 4),
        "conv_bias": hf.flag(config, keys.conv_bias, True),
    }


def _limit(config: Mapping[str, Any], key: str) -> tuple[float, float]:
    """The least and the largest step of a token."""
    given = config.get(key)
    if given is None:
        return _DEFAULT_LIMIT
    numbers = [_number(one) for one in given] if isinstance(given, list | tuple) else []
    found = [one for one in numbers if one is not None]
    if len(numbers) != 2 or len(found) != 2 or not 0 <= found[0] < found[1]:
        raise ConfigError(
            f"config key {key!r} must be two numbers from 0, the smaller one first, got "
            f"{short(given)}"
        )
    return found[0], found[1]


def _number(value: Any) -> float | None:
    """A number as JSON has it, or as transformers writes an infinite one."""
    if value == {"__float__": "Infinity"}:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def with_attention(config: Mapping[str, Any], *keys: str) -> list[bool] | None:
    """For each layer True if it has attention, False if it has Mamba; None without a list.

    ``keys`` are the names of the list, of which the first one that is given counts.
    """
    num_layers = hf.positive_int(config, "num_hidden_layers")
    lists = [(key, config.get(key)) for key in keys]
    given = next(((key, found) for key, found in lists if found is not None), None)
    if given is None:
        return None
    key, kinds = given
    fits = isinstance(kinds, list | tuple) and len(kinds) == num_layers
    if not fits or not all(kind in (*ATTENTION, *MAMBA) for kind in kinds):
        raise ConfigError(
            f"config key {key!r} must hold {MAMBA[0]!r} or {ATTENTION[0]!r} for each of the "
            f"{num_layers} layers"
        )
    return [kind in ATTENTION for kind in kinds]


def mamba2_specs(
    path: str,
    source: str,
    c: Mamba2Config,
    width: int,
    norm_dtype: jnp.dtype | None,
    name: str = "mamba.",
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.mamba2``; ``name`` is that of the mixer in tensors' names."""
    own = source + name
    linears = (
        Linear(
            "into", ("in_proj",), (width, sum(c.projected.widths)), (None, c.projected), c.into_bias
        ),
        Linear("o", ("out_proj",), (c.inner, width), ("heads", None), c.o_bias),
    )
    weights, biases = linear_specs(path, own, linears)
    yield from (*weights, *biases)
    taps = (c.conv_width, sum(c.channels.widths))
    yield from conv_specs(path, f"{own}conv1d", taps, c.channels, bias=c.conv_bias)
    decay = tuple(Source(f"{own}{one}", (c.num_heads,)) for one in ("A_log", "dt_bias", "D"))
    array = ArraySpec((3, c.num_heads), (None, "heads"), _FLOAT32)
    yield ParamSpec(f"{path}decay", array, decay, stack)
    if c.norm is not None:
        norm = (Source(f"{own}norm.weight", (c.inner,)),)
        array = ArraySpec((c.inner,), ("heads",), norm_dtype)
        yield ParamSpec(f"{path}inner_norm", array, norm, as_is)


def mamba_config(
    config: Mapping[str, Any],
    keys: MambaKeys = _MAMBA_KEYS,
    *,
    rank: str = "time_step_rank",
    inner: str | None = "intermediate_size",
    **more: Any,
) -> MambaConfig:
    """The mixer of a config; ``rank`` and ``inner`` are keys of widths, ``more`` further fields."""
    hf.supported_only(config, "hidden_act", "silu", "swish")
    width, expanded = hf.positive_int(config, "hidden_size"), _expanded(config, keys)
    is_derived = config.get(rank) in (None, "auto")
    return MambaConfig(
        inner=expanded if inner is None else hf.positive_int(config, inner, expanded),
        rank=-(-width // 16) if is_derived else hf.positive_int(config, rank),
        bias=hf.flag(config, keys.bias, False),
        **_states_and_taps(config, keys, 16),
        **more,
    )


def mamba_specs(
    path: str,
    source: str,
    c: MambaConfig,
    width: int,
    norm_dtype: jnp.dtype | None,
    name: str = "mamba.",
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.mamba``; ``name`` is that of the mixer in tensors' names."""
    own, inner, inputs = source + name, c.inner, c.rank + 2 * c.state_dim
    into = (None, Fused("heads", (inner, inner)))
    linears = (
        Linear("into", ("in_proj",), (width, 2 * inner), into, c.bias),
        Linear("o", ("out_proj",), (inner, width), ("heads", None), c.bias),
    )
    weights, biases = linear_specs(path, own, linears)
    yield from (*weights, *biases)
    steps = (
        Linear("x", ("x_proj",), (inner, inputs), ("heads", None), bias=False),
        Linear("dt", ("dt_proj",), (c.rank, inner), (None, "heads"), bias=False),
    )
    # a decay to the power of the tokens is sensitive, so that steps are never quantised
    yield from (replace(spec, matrix=None) for spec in linear_specs(path, own, steps)[0])
    taps = (c.conv_width, inner)
    yield from conv_specs(path, f"{own}conv1d", taps, "heads", bias=c.conv_bias)
    rates = (Source(f"{own}A_log", (inner, c.state_dim)),)
    array = ArraySpec((inner, c.state_dim), ("heads", None), _FLOAT32)
    yield ParamSpec(f"{path}rates", array, rates, as_is)
    decay = tuple(Source(f"{own}{one}", (inner,)) for one in ("dt_proj.bias", "D"))
    array = ArraySpec((2, inner), (None, "heads"), _FLOAT32)
    yield ParamSpec(f"{path}decay", array, decay, stack)
    if c.inner_norms == "weights":
        widths = {"dt": c.rank, "b": c.state_dim, "c": c.state_dim}
        norms = tuple(Source(f"{own}{n}_layernorm.weight", (w,)) for n, w in widths.items())
        array = ArraySpec((inputs,), (None,), norm_dtype)
        yield ParamSpec(f"{path}inner_norm", array, norms, join)
