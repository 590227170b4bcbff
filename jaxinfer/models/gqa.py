"""Config keys and checkpoint tensors of families with grouped-query attention and a gated network.

The differences between families are arguments of ``gqa_config`` and ``gqa_param_specs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.params import (
    ArraySpec,
    ParamSpec,
    Shape,
    Source,
    as_is,
    join,
    join_outputs,
    stack,
)
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    ExpertsConfig,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
)
from jaxinfer.nn.placement import Axes, Fused
from jaxinfer.nn.rope import RopeConfig

# Buffers in old checkpoints, and the head that some tied checkpoints store as well. The head of an
# untied model is used by its spec, so it is not ignored.
GQA_IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")

_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)
_WINDOW = 4096  # transformers' default for Mistral and Qwen
_MAX_WINDOW_LAYERS = 28  # transformers' default for Qwen
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
# A linear layer: the name of its parameter, those of its tensors, shape, axes, and if it has a bias
type Linear = tuple[str, tuple[str, ...], Shape, Axes, bool]
# The parameters of a mixture of experts, of (path, start of tensor names, config, width).
type ExpertSpecs = Callable[[str, str, ExpertsConfig, int], Iterable[ParamSpec]]


def gqa_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: Literal["head", "all_heads"] | None,
    windows: tuple[int | None, ...],
    mlp_bias: bool = False,
    head_dim: int | None = None,
    scale: float | None = None,
    rope: RopeConfig | None = None,
    local_rope: RopeConfig | None = None,
    activation: str | None = None,
    norms: Literal["before", "after", "both"] = "before",
    tied: bool = False,
    sinks: bool = False,
    ffns: Sequence[FeedForwardSpec] | None = None,
    **more: Any,
) -> DecoderSpec:
    """A decoder from ``config.json``, with a layer for each of ``windows``.

    If they are None, ``head_dim`` is read or derived from the width, ``rope`` and ``activation``
    are read, ``scale`` is head_dim ** -0.5, layers with a window rotate like the others
    (``local_rope``), and all layers have the same dense network (``ffns``: the network of each).
    ``more`` are further fields. Raises ``ConfigError`` with the key.
    """
    hidden_size = hf.positive_int(config, "hidden_size")
    num_heads = hf.positive_int(config, "num_attention_heads")
    num_kv_heads = hf.positive_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config key 'num_attention_heads' {num_heads} is not a multiple of "
            f"'num_key_value_heads' {num_kv_heads}"
        )
    head_dim = head_dim or hf.positive_int(config, "head_dim", hidden_size // num_heads)
    rope = rope or rope_config(config, head_dim)
    if ffns is None:
        ffn = FeedForwardConfig(
            width=hf.positive_int(config, "intermediate_size"),
            activation=activation or hf.activation(config, "hidden_act", "silu"),
            gated=True,
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
            rope=rope if window is None else local_rope or rope,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            sinks=sinks,
        )
        for window in windows
    )
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerSpec(mixer, ffn, norms) for mixer, ffn in zip(mixers, ffns, strict=True)),
        lengths=rope.lengths(hf.positive_int(config, "max_position_embeddings")),
        norm="rms",
        norm_eps=hf.positive_float(config, "rms_norm_eps"),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", tied),
        dtype=dtype,
        **more,
    )


def upper_layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows: layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    first = hf.layer_index(config, "max_window_layers", _MAX_WINDOW_LAYERS)
    window = sliding_window(config)
    if not hf.flag(config, "use_sliding_window", False):
        window = None
    return windows_by_layer(config, window, first)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """The window in tokens: transformers' default if the key is absent, None if it is null."""
    if config.get("sliding_window", _WINDOW) is None:
        return None
    return hf.positive_int(config, "sliding_window", _WINDOW)


def windows_by_layer(
    config: Mapping[str, Any], window: int | None, first: int = 0
) -> tuple[int | None, ...]:
    """The window of each layer: ``layer_types`` decides, else layers from ``first`` on have one."""
    num_layers = hf.positive_int(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if i >= first else None for i in range(num_layers))
    known = isinstance(kinds, list | tuple) and all(kind in _LAYER_TYPES for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ConfigError(
            "config key 'layer_types' must hold 'full_attention' or 'sliding_attention' for each "
            f"of the {num_layers} layers"
        )
    if window is None and _SLIDING in kinds:
        raise ConfigError(
            f"config key 'layer_types' holds {_SLIDING!r}, but no window is switched on; set "
            "'sliding_window', and 'use_sliding_window' where the family has it"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


class NormSources(NamedTuple):
    """The names of a layer's norms in order, and the functions that build one and several."""

    names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    one: Callable[..., np.ndarray] = as_is
    several: Callable[..., np.ndarray] = stack


PRE_NORMS = NormSources()


def gqa_param_specs(
    config: DecoderSpec,
    norms: NormSources = PRE_NORMS,
    experts: ExpertSpecs | None = None,
) -> tuple[ParamSpec, ...]:
    """The parameters of ``Decoder``, with Hugging Face's names of their sources.

    ``experts`` has those of a layer's mixture of experts, of families that have one.
    """
    v, d = config.vocab_size, config.hidden_size
    embed, final = Source("model.embed_tokens.weight", (v, d)), Source("model.norm.weight", (d,))
    specs = [
        ParamSpec("embed", ArraySpec((v, d), ("vocab", None)), (embed,), as_is, matrix="rows"),
        ParamSpec("final_norm", ArraySpec((d,), (None,), config.norm_dtype), (final,), norms.one),
    ]
    if not config.tie_word_embeddings:
        head = Source("lm_head.weight", (v, d))
        array = ArraySpec((d, v), (None, "vocab"))
        specs.append(ParamSpec("lm_head", array, (head,), join_outputs, matrix="out_in"))
    for i in range(len(config.layers)):
        layer, path, source = config.layers[i], f"layers_{i}/", f"model.layers.{i}."
        specs.extend(_layer_specs(config, i, norms))
        if isinstance(layer.ffn, ExpertsConfig):
            assert experts is not None, "the family has no experts"
            specs.extend(experts(path, source, layer.ffn, d))
    return tuple(specs)


def dense_linears(ffn: FeedForwardConfig, width: int, source: str = "mlp.") -> tuple[Linear, ...]:
    """The linear layers of a gated network, with their tensors after ``source``."""
    f, pair = ffn.width, (f"{source}gate_proj", f"{source}up_proj")
    return (
        ("gate_up", pair, (width, 2 * f), (None, Fused("ffn", (f, f))), ffn.bias),
        ("down", (f"{source}down_proj",), (f, width), ("ffn", None), ffn.bias),
    )


def linear_specs(
    path: str, source: str, linears: Iterable[Linear]
) -> tuple[list[ParamSpec], list[ParamSpec]]:
    """The weights of linear layers, and their biases."""
    weights: list[ParamSpec] = []
    biases: list[ParamSpec] = []
    for name, tensors, shape, axes, has_bias in linears:
        widths = axes[1].widths if isinstance(axes[1], Fused) else shape[1:]
        parts = [(source + tensor, out) for tensor, out in zip(tensors, widths, strict=True)]
        sources = tuple(Source(f"{part}.weight", (out, shape[0])) for part, out in parts)
        array = ArraySpec(shape, axes)
        weights.append(ParamSpec(path + name, array, sources, join_outputs, matrix="out_in"))
        if has_bias:
            sources = tuple(Source(f"{part}.bias", (out,)) for part, out in parts)
            array = ArraySpec(shape[1:], axes[1:])
            biases.append(ParamSpec(f"{path}{name}_bias", array, sources, join))
    return weights, biases


def _layer_specs(config: DecoderSpec, index: int, norms: NormSources) -> Iterator[ParamSpec]:
    """The parameters of a layer without those of experts."""
    mixer, ffn = config.layers[index].mixer, config.layers[index].ffn
    assert isinstance(mixer, AttentionConfig)
    path, source = f"layers_{index}/", f"model.layers.{index}."
    q, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    d = config.hidden_size
    linears: tuple[Linear, ...] = (
        ("qkv", _QKV, (d, q + 2 * kv), (None, Fused("heads", (q, kv, kv))), mixer.qkv_bias),
        ("o", ("self_attn.o_proj",), (q, d), ("heads", None), mixer.o_bias),
    )
    if isinstance(ffn, FeedForwardConfig):
        linears += dense_linears(ffn, d)
    weights, biases = linear_specs(path, source, linears)
    yield from weights

    def stacked(name: str, tensors: tuple[str, ...], width: int) -> ParamSpec:
        sources = tuple(Source(f"{source}{tensor}.weight", (width,)) for tensor in tensors)
        array = ArraySpec((len(tensors), width), (None, None), config.norm_dtype)
        return ParamSpec(path + name, array, sources, norms.several)

    yield stacked("norms", norms.names, d)
    yield from biases
    if mixer.sinks:
        array = ArraySpec((mixer.num_heads,), ("heads",))
        sinks = (Source(f"{source}self_attn.sinks", array.shape),)
        yield ParamSpec(f"{path}sinks", array, sinks, as_is)
    if mixer.qk_norm == "head":
        yield stacked("qk_norms", _QK_NORMS, mixer.head_dim)
    elif mixer.qk_norm == "all_heads":
        array = ArraySpec((q + kv,), (Fused("heads", (q, kv)),), config.norm_dtype)
        widths = zip(_QK_NORMS, (q, kv), strict=True)
        sources = tuple(Source(f"{source}{name}.weight", (width,)) for name, width in widths)
        yield ParamSpec(path + "qk_norms", array, sources, join)
