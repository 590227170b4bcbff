"""Config keys and checkpoint tensors of families with grouped-query attention and a gated network.

The differences between families are arguments of ``gqa_config`` and ``gqa_param_specs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp

from jaxinfer.models import hf_config as hf
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.layer_kinds import windows_by_layer
from jaxinfer.models.linears import Linear, dense_linears, linear_specs
from jaxinfer.models.names import LLAMA, NormSources, TensorNames
from jaxinfer.models.params import ParamSpec, as_is, join, join_outputs, transposed
from jaxinfer.models.sources import ArraySpec, PackedHeads, RotaryRows, Source
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
)
from jaxinfer.nn.layer_spec import NormKind, QKNormKind
from jaxinfer.nn.mixers.side_by_side_spec import SideBySideConfig
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.rope import RopeConfig

# Buffers in old checkpoints, and the head that some tied checkpoints store as well. The head of an
# untied model is used by its spec, so it is not ignored.
GQA_IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")

_NORM_TENSORS = MappingProxyType(
    {
        "rms": ("weight",),
        "rms_plain": (),
        "rms_groups": ("weight",),
        "layer": ("weight", "bias"),
        "layer_weight": ("weight",),
        "layer_plain": (),
        "none": (),
    }
)
_EPS_KEYS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("rms", "rms_plain", "rms_groups"), "rms_norm_eps")
)  # others: layer_norm_eps
# The parameters of a network with experts, of (path, start of tensor names, spec, width).
type ExpertSpecs = Callable[[str, str, Any, int], Iterable[ParamSpec]]
# The parameters of a mixer that is not grouped-query attention, of (path, start of tensor names,
# mixer, width of the stream, dtype of norms).
type MixerSpecs = Callable[[str, str, Any, int, Any], Iterable[ParamSpec]]


def gqa_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: QKNormKind | None = None,
    windows: Sequence[int | None] | None = None,
    mlp_bias: bool | Literal["down"] = False,
    head_dim: int | None = None,
    scale: float | None = None,
    rope: RopeConfig | None = None,
    local_rope: RopeConfig | None = None,
    theta: float = 10000.0,
    partial_rotary: float | None = None,
    activation: str | None = None,
    rotates: Sequence[bool] | None = None,
    gated: bool = True,
    norms: Literal["before", "after", "both", "shared"] = "before",
    norm: NormKind = "rms",
    norm_eps: float | None = None,
    parallel: bool = False,
    tied: bool = False,
    sinks: bool = False,
    ffns: Sequence[FeedForwardSpec] | None = None,
    attention: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> DecoderSpec:
    """A decoder from ``config.json``, with a layer for each of ``windows``.

    Without them ``layer_types`` may be absent or name no window. If others are None, ``head_dim``
    is read or derived from the width, ``rope`` and ``activation`` are read (``theta``: the default
    base), ``scale`` is head_dim ** -0.5, layers with a window rotate like the others
    (``local_rope``), all layers rotate (``rotates``: which do), heads rotate whole
    (``partial_rotary``: the default for the part that does), all layers have the same dense network
    (``ffns``: the network of each), and ``norm_eps`` is read. ``attention`` are further fields of
    attention, ``more`` of the decoder. Raises ``ConfigError`` with the key.
    """
    hidden_size = hf.positive_int(config, "hidden_size")
    num_heads, num_kv_heads = hf.head_counts(config)
    head_dim = head_dim or hf.positive_int(config, "head_dim", hidden_size // num_heads)
    used = rotates is None or any(rotates)
    rope = rope or rope_config(config, head_dim, theta=theta, partial=partial_rotary, used=used)
    if windows is None:
        windows = windows_by_layer(config, None)
    if ffns is None:
        ffn = FeedForwardConfig(
            width=hf.positive_int(config, "intermediate_size"),
            activation=activation or hf.activation(config, "hidden_act", "silu"),
            gated=gated,
            bias=mlp_bias,
        )
        ffns = [ffn] * len(windows)
    mixers = (
        AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=scale or head_dim**-0.5,
            window=window,
            rope=(rope if window is None else local_rope or rope) if rotated else None,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            sinks=sinks,
            **attention,
        )
        for window, rotated in zip(windows, rotates or [True] * len(windows), strict=True)
    )
    layers = (
        LayerSpec(mixer, ffn, norms, parallel=parallel)
        for mixer, ffn in zip(mixers, ffns, strict=True)
    )
    eps_key = _EPS_KEYS.get(norm, "layer_norm_eps")
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(layers),
        lengths=rope.lengths(hf.positive_int(config, "max_position_embeddings")),
        norm=norm,
        norm_eps=norm_eps or hf.positive_float(config, eps_key),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", tied),
        dtype=dtype,
        **more,
    )


def with_mixers(decoder: DecoderSpec, mixers: Mapping[int, MixerSpec]) -> DecoderSpec:
    """The decoder with other mixers than attention in these layers."""
    layers = list(decoder.layers)
    for i, mixer in mixers.items():
        layers[i] = replace(layers[i], mixer=mixer)
    return replace(decoder, layers=tuple(layers))


PRE_NORMS = NormSources()


def gqa_param_specs(
    config: DecoderSpec,
    norms: NormSources = PRE_NORMS,
    experts: ExpertSpecs | None = None,
    names: TensorNames = LLAMA,
    interleaved: bool = False,
    mixers: MixerSpecs | None = None,
) -> tuple[ParamSpec, ...]:
    """The parameters of ``Decoder``, with Hugging Face's names of their sources.

    ``experts`` has those of a layer's mixture of experts and ``mixers`` those of another mixer than
    attention, of families that have one. With ``interleaved`` component 2i of a head rotates with
    2i + 1 in the checkpoint.
    """
    d, specs = config.hidden_size, outer_specs(config, norms, names)
    for i in range(len(config.layers)):
        layer, path, source = config.layers[i], f"layers_{i}/", names.layer.format(i)
        specs.extend(_layer_specs(config, i, norms, names, mixers, interleaved))
        if layer.ffn.experts is not None:
            assert experts is not None, "the family has no experts"
            specs.extend(experts(path, source, layer.ffn, d))
    return tuple(specs)


def outer_specs(
    config: DecoderSpec, norms: NormSources = PRE_NORMS, names: TensorNames = LLAMA
) -> list[ParamSpec]:
    """The parameters outside the layers: embedding, positions, final norm, and an untied head."""
    v, d, e = config.vocab_size, config.hidden_size, config.embed_width or config.hidden_size
    embed = Source(f"{names.embed}.weight", (v, e))
    array = ArraySpec((v, e), ("vocab", None))
    specs = [ParamSpec("embed", array, (embed,), as_is, matrix="rows")]
    if config.num_positions is not None:
        array = ArraySpec((config.num_positions + config.first_position, d), (None, None))
        table = (Source(f"{names.positions}.weight", array.shape),)
        specs.append(ParamSpec("positions", array, table, as_is))
    if config.embed_width is not None:
        into, back = names.project
        for path, name, shape in (("project_in", into, (e, d)), ("project_out", back, (d, e))):
            own = (Source(f"{name}.weight", shape[::-1]),)
            specs.append(ParamSpec(path, ArraySpec(shape, (None, None)), own, transposed))
    if config.embed_norm is True:
        specs += outer_norm("embed_norm", names.embed_norm, config, norms)
    specs += outer_norm("final_norm", names.final_norm, config, norms)
    if not config.tie_word_embeddings:
        head = Source(f"{names.head}.weight", (v, e))
        array = ArraySpec((e, v), (None, "vocab"))
        specs.append(ParamSpec("lm_head", array, (head,), join_outputs, matrix="out_in"))
    if config.head_scale is not None:
        scale = (Source(f"{names.head}.logit_scale", (v,)),)
        specs.append(ParamSpec("lm_head_scale", ArraySpec((v,), ("vocab",)), scale, as_is))
    if config.head_bias:
        bias = (Source(f"{names.head}.bias", (v,)),)
        specs.append(ParamSpec("lm_head_bias", ArraySpec((v,), ("vocab",)), bias, as_is))
    return specs


def outer_norm(path: str, name: str, config: DecoderSpec, norms: NormSources) -> list[ParamSpec]:
    """The parameter of a norm outside the layers; none of a norm without parameters."""
    d = config.hidden_size
    found = tuple(Source(f"{name}.{kind}", (d,)) for kind in _NORM_TENSORS[config.norm])
    if not found:
        return []
    if len(found) == 1:
        array = ArraySpec((d,), (None,), config.norm_dtype)
        return [ParamSpec(path, array, found, norms.one)]
    array = ArraySpec((len(found), d), (None, None), config.norm_dtype)
    return [ParamSpec(path, array, found, norms.several)]


def _qkv_linear(
    mixer: AttentionConfig,
    width: int,
    names: TensorNames,
    rows: Callable[[int], RotaryRows | None],
) -> Linear:
    """The linear layer of q, k and v; ``rows``: the row order of so many heads."""
    n, k, h, v = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.value_dim
    parts, widths, units = (n * h, k * h, k * v), (), (n, k, k)
    tensors, orders = names.qkv, (rows(n), rows(k), None)
    if names.groups:
        local = n * h // names.groups
        orders = (PackedHeads(names.groups, (local,) * 3, (0, 2, 1), orders),)
    elif names.packed:
        orders = (PackedHeads(k, (n // k * h, h, h), (), orders),)
    elif len(tensors) == 1:
        orders = (rows(n + k),)
    elif mixer.gate and names.gate is not None:
        parts, units = (n * h, *parts), (n, *units)
        tensors, orders = (names.gate, *tensors), (None, *orders)
    elif mixer.gate:  # a head's query and its gate are adjacent in the tensor of queries
        parts, widths, units = (n * h, *parts), (2 * n * h, k * h, k * h), (n, *units)
        orders = (PackedHeads(n, (h, h), (1, 0), (None, rows(n))), *orders[1:])
    if mixer.values == "keys":
        assert len(tensors) == 3, "the tensor would hold values"
        parts, tensors, orders, units = parts[:-1], tensors[:-1], orders[:-1], units[:-1]
    axes = (None, Fused("heads", parts, units))
    shape = (width, sum(parts))
    first = mixer.gate_bias or not mixer.gate
    return Linear("qkv", tensors, shape, axes, mixer.qkv_bias, orders, widths, first)


def _rotary_rows(
    mixer: AttentionConfig, heads: int, *, interleaved: bool, in_order: bool
) -> RotaryRows | None:
    """The row order of so many heads; None if they rotate whole, or in part, as the kernels do."""
    rotated = mixer.head_dim if mixer.rope is None else mixer.rope.width
    if in_order or rotated == mixer.head_dim and not interleaved:
        return None
    return RotaryRows(heads, mixer.head_dim, rotated, interleaved)


def _layer_specs(
    config: DecoderSpec,
    index: int,
    norms: NormSources,
    names: TensorNames,
    mixers: MixerSpecs | None,
    interleaved: bool,
) -> Iterator[ParamSpec]:
    """The parameters of a layer without those of experts."""
    mixer, ffn, d = config.layers[index].mixer, config.layers[index].ffn, config.hidden_size
    path, source = f"layers_{index}/", names.layer.format(index)
    linears: tuple[Linear, ...] = ()
    attention = mixer.attention if isinstance(mixer, SideBySideConfig) else mixer
    if isinstance(attention, AttentionConfig):
        order = {"interleaved": interleaved, "in_order": names.in_order}
        rows = partial(_rotary_rows, attention, **order)
        heads = attention.num_heads * attention.value_dim
        linears = (
            _qkv_linear(attention, d, names, rows),
            Linear("o", (names.o,), (heads, d), ("heads", None), attention.o_bias),
        )
        if attention.head_gate:
            assert names.gate is not None, "the gates have a tensor"
            own = (Source(f"{source}{names.gate}.weight", (attention.num_heads, d)),)
            array = ArraySpec((d, attention.num_heads), (None, "heads"))
            yield ParamSpec(f"{path}head_gate", array, own, join_outputs)
    if isinstance(mixer, SideBySideConfig):
        assert mixers is not None, "the family has no other mixers"
        yield from mixers(f"{path}beside/", source, mixer.other, d, config.norm_dtype)
    elif not isinstance(mixer, AttentionConfig) and not mixer.is_absent:
        assert mixers is not None, "the family has no other mixers"
        yield from mixers(path, source, mixer, d, config.norm_dtype)
    if isinstance(ffn, FeedForwardConfig):
        linears += dense_linears(ffn, d, names=names)
    weights, biases = linear_specs(path, source, linears)
    yield from weights
    kinds, own = _NORM_TENSORS[config.norm], norms.of_layer(config.layers[index])
    tensors = tuple(f"{name}.{kind}" for name in own for kind in kinds)
    if tensors:
        yield _norm_stack(path + "norms", source, tensors, d, config, norms)
    yield from biases
    if isinstance(ffn, FeedForwardConfig) and ffn.norm is not None:
        array = ArraySpec((ffn.width,), ("ffn",), config.norm_dtype)
        norm = (Source(f"{source}{names.down_norm}.weight", array.shape),)
        yield ParamSpec(path + "down_norm", array, norm, norms.one)
    if isinstance(attention, AttentionConfig):
        yield from _head_specs(path, source, attention, config, norms, names, rows)


def _norm_stack(
    path: str,
    source: str,
    tensors: tuple[str, ...],
    width: int,
    config: DecoderSpec,
    norms: NormSources,
    order: RotaryRows | None = None,
) -> ParamSpec:
    """Norms of equal width as one parameter."""
    sources = tuple(Source(f"{source}{tensor}", (width,), rows=order) for tensor in tensors)
    array = ArraySpec((len(sources), width), (None, None), config.norm_dtype)
    return ParamSpec(path, array, sources, norms.several)


def _head_specs(
    path: str,
    source: str,
    mixer: AttentionConfig,
    config: DecoderSpec,
    norms: NormSources,
    names: TensorNames,
    rows: Callable[[int], RotaryRows | None],
) -> Iterator[ParamSpec]:
    """The sinks of attention heads, and the norms of their queries, keys and outputs."""
    if mixer.out_norm is not None:
        array = ArraySpec((mixer.num_heads * mixer.head_dim,), ("heads",), config.norm_dtype)
        norm = (Source(f"{source}{names.o_norm}.weight", array.shape),)
        yield ParamSpec(path + "o_norm", array, norm, norms.one)
    if mixer.sinks:
        array = ArraySpec((mixer.num_heads,), ("heads",))
        sinks = (Source(source + names.sinks, array.shape),)
        yield ParamSpec(f"{path}sinks", array, sinks, as_is)
    if mixer.qk_norm in ("head", "rotated"):
        own = tuple(f"{name}.weight" for name in names.qk_norms)
        yield _norm_stack(path + "qk_norms", source, own, mixer.head_dim, config, norms, rows(1))
    elif mixer.qk_norm == "layer":
        own = tuple(f"{name}.{kind}" for name in names.qk_norms for kind in ("weight", "bias"))
        yield _norm_stack(path + "qk_norms", source, own, mixer.head_dim, config, norms, rows(1))
    elif mixer.qk_norm in ("layers", "layers_bias"):
        counts = (mixer.num_heads, mixer.num_kv_heads)
        axis = Fused("heads", tuple(count * mixer.head_dim for count in counts), counts)
        array = ArraySpec((sum(axis.widths),), (axis,), config.norm_dtype)
        own = partial(_head_norms, source, mixer, names, rows(1))
        yield ParamSpec(path + "qk_norms", array, own("weight"), join)
        if mixer.qk_norm == "layers_bias":
            yield ParamSpec(path + "qk_norm_biases", array, own("bias"), join)
    elif mixer.qk_norm == "all_heads":
        widths = (mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim)
        axis = Fused("heads", widths, (mixer.num_heads, mixer.num_kv_heads))
        array = ArraySpec((sum(widths),), (axis,), config.norm_dtype)
        sources = tuple(
            Source(f"{source}{name}.weight", (width,), rows=rows(width // mixer.head_dim))
            for name, width in zip(names.qk_norms, widths, strict=True)
        )
        yield ParamSpec(path + "qk_norms", array, sources, join)


def _head_norms(
    source: str, mixer: AttentionConfig, names: TensorNames, order: RotaryRows | None, kind: str
) -> tuple[Source, ...]:
    """The weights or biases of a norm of each head: tensors of their own, or parts of two."""
    heads = [
        (f"{source}{name}", count, i)
        for name, count in zip(names.qk_norms, (mixer.num_heads, mixer.num_kv_heads), strict=True)
        for i in range(count)
    ]
    width = mixer.head_dim
    if names.stacked_norms:
        return tuple(Source(f"{n}.{kind}", (c, width), part=i, rows=order) for n, c, i in heads)
    return tuple(Source(f"{n}.norms.{i}.{kind}", (width,), rows=order) for n, _, i in heads)
