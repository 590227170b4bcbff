"""Config keys and checkpoint tensors of mixers with the gated delta rule, as in Qwen3-Next, and
tensors as in Kimi Linear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, conv_taps, join_flat, stack
from jaxinfer.models.sources import ArraySpec, PackedHeads, Source
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.placement import Fused

LINEAR_KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "mamba_ssm_dtype"),
)
_FLOAT32 = jnp.dtype(jnp.float32)


def delta_config(config: Mapping[str, Any]) -> DeltaConfig:
    """The mixer of the keys ``linear_...``; raises ``ConfigError`` for sizes that do not fit."""
    heads = hf.positive_int(config, "linear_num_key_heads")
    values = hf.positive_int(config, "linear_num_value_heads")
    if values % heads:
        raise ConfigError(
            f"config key 'linear_num_value_heads' {values} is not a multiple of "
            f"'linear_num_key_heads' {heads}"
        )
    hf.supported_only(config, "mamba_ssm_dtype", "float32")
    return DeltaConfig(
        num_k_heads=heads,
        num_v_heads=values,
        k_dim=hf.positive_int(config, "linear_key_head_dim"),
        v_dim=hf.positive_int(config, "linear_value_head_dim"),
        conv_width=hf.positive_int(config, "linear_conv_kernel_dim"),
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
    )


def delta_specs(
    path: str, source: str, c: DeltaConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.delta``, with Qwen3.5's names of their sources."""
    channels, heads = sum(c.channels.widths), c.num_v_heads
    tensors = (
        _Tensors(("in_proj_qkv", "in_proj_z"), (channels, c.values)),
        _Tensors(("in_proj_b", "in_proj_a"), (heads, heads)),
    )
    return _specs(path, f"{source}linear_attn.", c, width, norm_dtype, tensors)


def packed_delta_specs(
    path: str, source: str, c: DeltaConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The same with Qwen3-Next's names, whose tensors have the parts of each key head together."""
    each = c.num_v_heads // c.num_k_heads
    inputs = (c.k_dim, c.k_dim, each * c.v_dim, each * c.v_dim)
    tensors = (
        _Tensors(("in_proj_qkvz",), (), (PackedHeads(c.num_k_heads, inputs),)),
        _Tensors(("in_proj_ba",), (), (PackedHeads(c.num_k_heads, (each, each)),)),
    )
    return _specs(path, f"{source}linear_attn.", c, width, norm_dtype, tensors)


class _Tensors(NamedTuple):
    """The tensors that are joined to one parameter: names, outputs of each, and row orders."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    rows: tuple[PackedHeads, ...] = ()


def _specs(
    path: str,
    own: str,
    c: DeltaConfig,
    width: int,
    norm_dtype: jnp.dtype | None,
    tensors: tuple[_Tensors, _Tensors],
    *,
    out: str = "out_proj",
    convs: Mapping[str, int] | None = None,
    norm: str = "norm",
) -> Iterator[ParamSpec]:
    """The parameters; ``tensors`` are those of the inputs and of the gates, ``convs`` of the
    convolution, by default one.
    """
    heads = c.num_v_heads
    parts = ((*c.channels.widths, c.values), (heads, c.decays))
    linears = [
        Linear(
            name,
            given.names,
            (width, sum(widths)),
            (None, Fused("heads", widths)),
            bias=False,
            rows=given.rows,
            widths=given.widths,
        )
        for name, widths, given in zip(("qkvz", "ba"), parts, tensors, strict=True)
    ]
    linears.append(Linear("o", (out,), (c.values, width), ("heads", None), bias=False))
    weights, _ = linear_specs(path, own, linears)
    # a decay to the power of the tokens is sensitive, so that the gates are never quantised
    yield from (replace(w, matrix=None) if w.path == f"{path}ba" else w for w in weights)
    yield _conv_spec(path, c, convs or {f"{own}conv1d": sum(c.channels.widths)})
    decay = (Source(f"{own}A_log", (heads,)), Source(f"{own}dt_bias", (c.decays,)))
    if c.decay == "channel":
        array = ArraySpec((heads + c.decays,), (Fused("heads", (heads, c.decays)),), _FLOAT32)
        yield ParamSpec(f"{path}decay", array, decay, join_flat)
    else:
        array = ArraySpec((2, heads), (None, "heads"), _FLOAT32)
        yield ParamSpec(f"{path}decay", array, decay, stack)
    yield _norm_spec(path, c, f"{own}{norm}", norm_dtype)


def separate_delta_specs(
    path: str, source: str, c: DeltaConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The same with OLMo Hybrid's names, whose tensors are of one part each."""
    own, keys, values = f"{source}linear_attn.", c.keys, c.values
    tensors = (
        _Tensors(("q_proj", "k_proj", "v_proj", "g_proj"), (keys, keys, values, values)),
        _Tensors(("b_proj", "a_proj"), (c.num_v_heads, c.num_v_heads)),
    )
    convs = zip((f"{own}{name}_conv1d" for name in "qkv"), c.channels.widths, strict=True)
    yield from _specs(
        path, own, c, width, norm_dtype, tensors, out="o_proj", convs=dict(convs), norm="o_norm"
    )


class _InAndGates(NamedTuple):
    """Inputs and gates from one tensor, whose first ``inputs`` rows are those of inputs."""

    inputs: int

    def __call__(self, tensor: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters."""
        return {"qkvz": tensor[: self.inputs].T, "ba": tensor[self.inputs :].T}

    def inverse(self, arrays: Mapping[str, np.ndarray], _: object) -> list[np.ndarray]:
        """See ``params.tensors_of``."""
        return [np.concatenate([arrays["qkvz"], arrays["ba"]], axis=1).T]


def fused_delta_specs(
    path: str, source: str, c: DeltaConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The same with Lara's names, of which one tensor has all inputs and gates."""
    own, inputs = f"{source}linear_attn.", sum(c.channels.widths) + c.values
    tensors = (_Tensors(("in_proj",), ()), _Tensors(("in_proj",), ()))
    given = _specs(path, own, c, width, norm_dtype, tensors, norm="out_norm")
    specs = {spec.path.removeprefix(path): spec for spec in given}
    arrays = {name: specs.pop(name).leaves[path + name] for name in ("qkvz", "ba")}
    fused = Source(f"{own}in_proj.weight", (inputs + c.num_v_heads + c.decays, width))
    yield ParamSpec(path.removesuffix("/"), arrays, (fused,), _InAndGates(inputs))
    yield from specs.values()


def channel_delta_specs(
    path: str,
    source: str,
    c: DeltaConfig,
    width: int,
    norm_dtype: jnp.dtype | None,
    *,
    flat_rates: bool = False,
) -> Iterator[ParamSpec]:
    """The parameters with decays of channels and latents of gates, with Kimi Linear's names.

    With ``flat_rates`` the tensor of rates has one dimension, as in GLM-5.3-Flash.
    """
    own, heads, rank = f"{source}self_attn.", c.num_v_heads, c.gate_rank
    assert rank is not None and c.decay == "channel"
    channels = c.channels.widths
    linears = (
        Linear(
            "qkv", ("q_proj", "k_proj", "v_proj"), (width, sum(channels)), (None, c.channels), False
        ),
        Linear("o", ("o_proj",), (c.values, width), ("heads", None), bias=False),
    )
    # as above, and every device needs the whole latents, so that their matrix is not divided
    inner = (heads, rank, rank)
    gates = (
        Linear(
            "ba",
            ("b_proj", "f_a_proj", "g_a_proj"),
            (width, sum(inner)),
            (None, None),
            bias=False,
            widths=inner,
        ),
        Linear("decay_b", ("f_b_proj",), (rank, c.decays), (None, "heads"), bias=False),
        Linear("gate_b", ("g_b_proj",), (rank, c.values), (None, "heads"), bias=False),
    )
    yield from linear_specs(path, own, linears)[0]
    yield from (replace(spec, matrix=None) for spec in linear_specs(path, own, gates)[0])
    rates = (heads,) if flat_rates else (1, 1, heads, 1)
    decay = (Source(f"{own}A_log", rates), Source(f"{own}dt_bias", (c.decays,)))
    array = ArraySpec((heads + c.decays,), (Fused("heads", (heads, c.decays)),), _FLOAT32)
    yield ParamSpec(f"{path}decay", array, decay, join_flat)
    tensors = zip((f"{own}{name}_conv1d" for name in "qkv"), channels, strict=True)
    yield _conv_spec(path, c, dict(tensors))
    yield _norm_spec(path, c, f"{own}o_norm", norm_dtype)


def channel_gates_delta_specs(
    path: str, source: str, c: DeltaConfig, width: int, norm_dtype: jnp.dtype | None
) -> Iterator[ParamSpec]:
    """The parameters with decays of channels and gates without latents, with Ling 3's names."""
    own, keys, values = f"{source}attention.", c.keys, c.values
    tensors = (
        _Tensors(("q_proj", "k_proj", "v_proj", "g_proj"), (keys, keys, values, values)),
        _Tensors(("b_proj", "f_proj"), (c.num_v_heads, c.decays)),
    )
    convs = zip((f"{own}{name}_conv1d" for name in "qkv"), c.channels.widths, strict=True)
    yield from _specs(
        path, own, c, width, norm_dtype, tensors, out="dense", convs=dict(convs), norm="o_norm"
    )


def _conv_spec(path: str, c: DeltaConfig, tensors: Mapping[str, int]) -> ParamSpec:
    """The taps of the convolution; ``tensors`` are names, and the channels of each."""
    sources = tuple(Source(f"{name}.weight", (n, 1, c.conv_width)) for name, n in tensors.items())
    array = ArraySpec((c.conv_width, sum(c.channels.widths)), (None, c.channels))
    # transformers saves OLMo Hybrid's in equal parts
    return ParamSpec(f"{path}conv", array, sources, conv_taps, any_rows=True)


def _norm_spec(path: str, c: DeltaConfig, tensor: str, norm_dtype: jnp.dtype | None) -> ParamSpec:
    """The norm of each head's output."""
    norm = Source(f"{tensor}.weight", (c.v_dim,))
    return ParamSpec(f"{path}head_norm", ArraySpec((c.v_dim,), (None,), norm_dtype), (norm,), as_is)
