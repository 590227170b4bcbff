"""What the families on ``nn.decoder`` share: their config keys and their checkpoint tensors.

Owns: ``gqa_config`` and ``gqa_tensor_rules``. A family states its oddities as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import TensorRule
from jaxinfer.models.gqa_config import DecoderConfig
from jaxinfer.models.hf_rope import rope_config
from jaxinfer.models.rules import as_is, join, join_outputs, stack
from jaxinfer.nn.rope import RopeConfig

# Buffers that old checkpoints carry, and the head that some tied checkpoints repeat. An untied
# model's head is consumed by its rule.
GQA_IGNORED_TENSORS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight")

_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)
_WINDOW = 4096  # what transformers assumes when a Mistral or Qwen config does not say
_MAX_WINDOW_LAYERS = 28  # likewise


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
    """A ``DecoderConfig`` from ``config.json``. ``head_dim`` None is derived from the width,
    ``rope`` and ``activation`` None are read; ``more`` are further fields.

    Raises ``ConfigError`` naming the key.
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
    """Qwen's sliding windows: in the layers from ``max_window_layers`` up, when switched on."""
    first = hf.layer_index(config, "max_window_layers", _MAX_WINDOW_LAYERS)
    window = sliding_window(config)
    if not hf.flag(config, "use_sliding_window", False):
        window = None
    return windows_by_layer(config, window, first)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """How far back a layer with a window looks: transformers' default where the key is absent, None
    where it is null.
    """
    if config.get("sliding_window", _WINDOW) is None:
        return None
    return hf.positive_int(config, "sliding_window", _WINDOW)


def windows_by_layer(
    config: Mapping[str, Any], window: int | None, first: int = 0
) -> tuple[int | None, ...]:
    """The window of each layer: of those from ``first`` up, unless ``layer_types`` says which."""
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


class NormRules(NamedTuple):
    """A layer's norms in the order in which they come, and how one and several are built."""

    names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    one: Callable[..., np.ndarray] = as_is
    several: Callable[..., np.ndarray] = stack


PRE_NORMS = NormRules()


def gqa_tensor_rules(config: DecoderConfig, norms: NormRules = PRE_NORMS) -> tuple[TensorRule, ...]:
    """Where each parameter of ``Decoder`` comes from, by Hugging Face's names."""
    v, d = config.vocab_size, config.hidden_size
    rules = [
        TensorRule("embed", (v, d), ("model.embed_tokens.weight",), ((v, d),), as_is),
        TensorRule(
            "final_norm", (d,), ("model.norm.weight",), ((d,),), norms.one, config.norm_dtype
        ),
    ]
    if not config.tie_word_embeddings:
        head = TensorRule("lm_head", (d, v), ("lm_head.weight",), ((v, d),), join_outputs)
        rules.append(head)
    for i in range(config.num_hidden_layers):
        rules.extend(_layer_rules(config, f"layers_{i}/", f"model.layers.{i}.", norms))
    return tuple(rules)


def _layer_rules(c: DecoderConfig, param: str, source: str, norms: NormRules) -> list[TensorRule]:
    d, f, h = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_attention_heads * h, c.num_key_value_heads * h
    attn, mlp = source + "self_attn.", source + "mlp."

    def rule(
        name: str,
        shape: tuple[int, ...],
        sources: tuple[str, ...],
        shapes: Any,
        build: Any,
        dtype: Any = None,
    ) -> TensorRule:
        return TensorRule(param + name, shape, sources, shapes, build, dtype)

    qkv = (attn + "q_proj", attn + "k_proj", attn + "v_proj")
    qkv_weights = tuple(name + ".weight" for name in qkv)
    qkv_biases = tuple(name + ".bias" for name in qkv)
    gate_up = (mlp + "gate_proj", mlp + "up_proj")
    gate_up_weights = tuple(name + ".weight" for name in gate_up)
    gate_up_biases = tuple(name + ".bias" for name in gate_up)
    of_layer = tuple(f"{source}{name}.weight" for name in norms.names)
    qk_norms = (attn + "q_norm.weight", attn + "k_norm.weight")
    rules = [
        rule("qkv", (d, q + 2 * kv), qkv_weights, ((q, d), (kv, d), (kv, d)), join_outputs),
        rule("o", (q, d), (attn + "o_proj.weight",), ((d, q),), join_outputs),
        rule("gate_up", (d, 2 * f), gate_up_weights, ((f, d), (f, d)), join_outputs),
        rule("down", (f, d), (mlp + "down_proj.weight",), ((d, f),), join_outputs),
        rule(
            "norms",
            (len(of_layer), d),
            of_layer,
            ((d,),) * len(of_layer),
            norms.several,
            c.norm_dtype,
        ),
    ]
    if c.qkv_bias:
        rules.append(rule("qkv_bias", (q + 2 * kv,), qkv_biases, ((q,), (kv,), (kv,)), join))
    if c.o_bias:
        rules.append(rule("o_bias", (d,), (attn + "o_proj.bias",), ((d,),), as_is))
    if c.mlp_bias:
        rules.append(rule("gate_up_bias", (2 * f,), gate_up_biases, ((f,), (f,)), join))
        rules.append(rule("down_bias", (d,), (mlp + "down_proj.bias",), ((d,),), as_is))
    if c.qk_norm:
        shapes = ((h,), (h,))
        rules.append(rule("qk_norms", (2, h), qk_norms, shapes, norms.several, c.norm_dtype))
    return rules
