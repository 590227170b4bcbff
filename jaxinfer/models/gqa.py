"""Config keys and checkpoint tensors that the families with ``DecoderConfig`` share.

The differences between families are arguments of ``gqa_config`` and ``gqa_param_specs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa_config import DecoderConfig
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.params import (
    ArraySpec,
    ParamSpec,
    Source,
    as_is,
    join,
    join_outputs,
    stack,
)
from jaxinfer.nn.placement import Axis, Fused
from jaxinfer.nn.rope import RopeConfig

# Buffers in old checkpoints, and the head that some tied checkpoints store as well. The head of an
# untied model is used by its spec, so it is not ignored.
GQA_IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")

_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)
_WINDOW = 4096  # transformers' default for Mistral and Qwen
_MAX_WINDOW_LAYERS = 28  # transformers' default for Qwen
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def gqa_config(
    config: Mapping[str, Any],
    dtype: jnp.dtype,
    *,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool,
    windows: tuple[int | None, ...],
    mlp_bias: bool = False,
    head_dim: int | None = None,
    rope: RopeConfig | None = None,
    activation: str | None = None,
    tied: bool = False,
    **more: Any,
) -> DecoderConfig:
    """A ``DecoderConfig`` from ``config.json``.

    If they are None, ``head_dim`` is read or derived from the width, and ``rope`` and
    ``activation`` are read. ``more`` are further fields. Raises ``ConfigError`` with the key.
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
    return DecoderConfig(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.positive_int(config, "intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.positive_int(config, "max_position_embeddings"),
        rms_norm_eps=hf.positive_float(config, "rms_norm_eps"),
        rope=rope or rope_config(config, head_dim),
        windows=windows,
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", tied),
        activation=activation or hf.activation(config, "hidden_act", "silu"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
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


def gqa_param_specs(config: DecoderConfig, norms: NormSources = PRE_NORMS) -> tuple[ParamSpec, ...]:
    """The parameters of ``Decoder``, with Hugging Face's names of their sources."""
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
    for i in range(config.num_hidden_layers):
        specs.extend(_layer_specs(config, f"layers_{i}/", f"model.layers.{i}.", norms))
    return tuple(specs)


def _layer_specs(
    c: DecoderConfig, path: str, source: str, norms: NormSources
) -> Iterator[ParamSpec]:
    d, h = c.hidden_size, c.head_dim
    yield from _matrix_specs(c, path, source)
    weights = tuple(Source(f"{source}{name}.weight", (d,)) for name in norms.names)
    array = ArraySpec((len(weights), d), (None, None), c.norm_dtype)
    yield ParamSpec(path + "norms", array, weights, norms.several)
    yield from _bias_specs(c, path, source)
    if c.qk_norm:
        names = (f"{source}self_attn.{part}_norm.weight" for part in "qk")
        array = ArraySpec((2, h), (None, None), c.norm_dtype)
        weights = tuple(Source(name, (h,)) for name in names)
        yield ParamSpec(path + "qk_norms", array, weights, norms.several)


def _matrix_specs(c: DecoderConfig, path: str, source: str) -> Iterator[ParamSpec]:
    d, f = c.hidden_size, c.intermediate_size

    def matrix(name: str, array: ArraySpec, *tensors: tuple[str, int, int]) -> ParamSpec:
        """Transposed and concatenated linear weights; ``tensors`` are (name, out, in)."""
        sources = (Source(f"{source}{one}.weight", (out, width)) for one, out, width in tensors)
        return ParamSpec(path + name, array, tuple(sources), join_outputs, matrix="out_in")

    qkv, gate_up = _qkv(c), Fused("ffn", (f, f))
    q, of_qkv = qkv.widths[0], zip(_QKV, qkv.widths, strict=True)
    inputs = ((name, width, d) for name, width in of_qkv)
    yield matrix("qkv", ArraySpec((d, sum(qkv.widths)), (None, qkv)), *inputs)
    yield matrix("o", ArraySpec((q, d), ("heads", None)), ("self_attn.o_proj", d, q))
    inputs = ((name, f, d) for name in _GATE_UP)
    yield matrix("gate_up", ArraySpec((d, 2 * f), (None, gate_up)), *inputs)
    yield matrix("down", ArraySpec((f, d), ("ffn", None)), ("mlp.down_proj", d, f))


def _bias_specs(c: DecoderConfig, path: str, source: str) -> Iterator[ParamSpec]:
    d, f = c.hidden_size, c.intermediate_size

    def bias(name: str, axis: Axis, *tensors: tuple[str, int]) -> ParamSpec:
        """Concatenated biases; ``tensors`` are (name, width)."""
        array = ArraySpec((sum(width for _, width in tensors),), (axis,))
        sources = (Source(f"{source}{one}.bias", (width,)) for one, width in tensors)
        return ParamSpec(path + name, array, tuple(sources), join)

    if c.qkv_bias:
        qkv = _qkv(c)
        yield bias("qkv_bias", qkv, *zip(_QKV, qkv.widths, strict=True))
    if c.o_bias:
        yield bias("o_bias", None, ("self_attn.o_proj", d))
    if c.mlp_bias:
        yield bias("gate_up_bias", Fused("ffn", (f, f)), *((name, f) for name in _GATE_UP))
        yield bias("down_bias", None, ("mlp.down_proj", d))


def _qkv(c: DecoderConfig) -> Fused:
    """The axis of concatenated queries, keys and values."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return Fused("heads", (q, kv, kv))
