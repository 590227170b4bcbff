"""Config and parameters of GPT-2, which GPT-1 has, too.

Source: ``modeling_gpt2`` of Hugging Face transformers. Its Conv1D weights are already [in, out] and
c_attn is already fused, so parameters are the checkpoint's tensors, except that norms are stacked:

    embed [V, D]             layers_i/qkv  [D, 3 * N * H]   layers_i/qkv_bias  [3 * N * H]
    positions [positions, D] layers_i/o    [N * H, D]       layers_i/o_bias    [D]
    final_norm [2, D]        layers_i/up   [D, F]           layers_i/up_bias   [F]
    lm_head [D, V]           layers_i/down [F, D]           layers_i/down_bias [D]
      unless tied            layers_i/norms [4, D]  weight, bias before attention; before ffn
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.params import ParamSpec, as_is, join_outputs, stack
from jaxinfer.models.sources import ArraySpec, Shape, Source
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardConfig, LayerSpec
from jaxinfer.nn.placement import Axes, Fused


def gpt2_config(config: Mapping[str, Any], dtype: jnp.dtype) -> DecoderSpec:
    """The config of a config.json; raises ``ConfigError`` for a missing or unsupported key."""
    hf.supported_only(config, "add_cross_attention", False)
    hidden_size = _size(config, "n_embd", "hidden_size")
    num_heads = _size(config, "n_head", "num_attention_heads")
    num_layers = _size(config, "n_layer", "num_hidden_layers")
    num_positions = _size(config, "n_positions", "max_position_embeddings")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config key 'n_embd' {hidden_size} is not a multiple of 'n_head' {num_heads}"
        )
    head_dim = hidden_size // num_heads
    ffn = FeedForwardConfig(
        width=hf.positive_int(config, "n_inner", 4 * hidden_size),
        activation=hf.activation(config, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    mixers = (
        AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=scale,
            qkv_bias=True,
            o_bias=True,
        )
        for scale in _attention_scales(config, head_dim, num_layers)
    )
    return DecoderSpec(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(LayerSpec(mixer, ffn) for mixer in mixers),
        lengths=(num_positions, num_positions),  # learned positions cannot be extended
        norm="layer",
        norm_eps=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", True),
        dtype=dtype,
        num_positions=num_positions,
    )


def _size(config: Mapping[str, Any], key: str, other: str) -> int:
    """A size under GPT-2's name of the key, or else under other families' name."""
    is_other = config.get(other) is not None and config.get(key) is None
    return hf.positive_int(config, other if is_other else key)


def _attention_scales(config: Mapping[str, Any], head_dim: int, layers: int) -> tuple[float, ...]:
    """The factor on the attention scores of each layer."""
    scale = head_dim**-0.5 if hf.flag(config, "scale_attn_weights", True) else 1.0
    if hf.flag(config, "scale_attn_by_inverse_layer_idx", False):
        return tuple(scale / (i + 1) for i in range(layers))
    return (scale,) * layers


def gpt2_param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """The parameters, with the released checkpoints' names of their sources."""
    v, d, length = config.vocab_size, config.hidden_size, config.lengths[1]
    final = (Source("ln_f.weight", (d,)), Source("ln_f.bias", (d,)))
    specs = [
        _as_stored("embed", "wte.weight", ArraySpec((v, d), ("vocab", None)), "rows"),
        _as_stored("positions", "wpe.weight", ArraySpec((length, d), (None, None))),
        ParamSpec("final_norm", ArraySpec((2, d), (None, None)), final, stack),
    ]
    if not config.tie_word_embeddings:
        head = Source("lm_head.weight", (v, d))
        array = ArraySpec((d, v), (None, "vocab"))
        specs.append(ParamSpec("lm_head", array, (head,), join_outputs, matrix="out_in"))
    for i, layer in enumerate(config.layers):
        assert isinstance(layer.ffn, FeedForwardConfig)
        specs.extend(_layer_specs(d, layer.ffn.width, f"layers_{i}/", f"h.{i}."))
    return tuple(specs)


def _layer_specs(d: int, f: int, path: str, source: str) -> Iterator[ParamSpec]:
    heads = Fused("heads", (d, d, d))
    linears: tuple[tuple[str, str, Shape, Axes], ...] = (
        ("qkv", "attn.c_attn", (d, 3 * d), (None, heads)),
        ("o", "attn.c_proj", (d, d), ("heads", None)),
        ("up", "mlp.c_fc", (d, f), (None, "ffn")),
        ("down", "mlp.c_proj", (f, d), ("ffn", None)),
    )
    for name, tensor, shape, axes in linears:
        tensor = source + tensor
        yield _as_stored(path + name, tensor + ".weight", ArraySpec(shape, axes), "in_out")
        yield _as_stored(path + name + "_bias", tensor + ".bias", ArraySpec(shape[1:], axes[1:]))
    norms = ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")
    sources = tuple(Source(source + name, (d,)) for name in norms)
    yield ParamSpec(path + "norms", ArraySpec((4, d), (None, None)), sources, stack)


def _as_stored(
    path: str, tensor: str, array: ArraySpec, matrix: Literal["in_out", "rows"] | None = None
) -> ParamSpec:
    """A parameter that is a checkpoint tensor."""
    return ParamSpec(path, array, (Source(tensor, array.shape),), as_is, matrix=matrix)
