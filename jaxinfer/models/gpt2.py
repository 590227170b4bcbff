"""GPT-2: learned positions, LayerNorm with biases, full multi-head attention, GELU.

Source: ``modeling_gpt2`` of Hugging Face transformers. Its Conv1D weights already lie [in, out] and
c_attn is already fused, so parameters are the checkpoint's tensors, norms packed:

    embed [V, D]             layers_i/qkv  [D, 3 * N * H]   layers_i/qkv_bias  [3 * N * H]
    positions [positions, D] layers_i/o    [N * H, D]       layers_i/o_bias    [D]
    final_norm [2, D]        layers_i/up   [D, F]           layers_i/up_bias   [F]
    lm_head [D, V]           layers_i/down [F, D]           layers_i/down_bias [D]
      unless tied            layers_i/norms [4, D]  weight and bias before attention, before ffw
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.base import ModelFamily, TensorRule
from jaxinfer.models.rules import as_is, join_outputs, stack
from jaxinfer.nn.activations import ACTIVATIONS
from jaxinfer.nn.attention import Attend
from jaxinfer.nn.kv import KVSpec, KVState, LayerKV, LayerKVSpec
from jaxinfer.nn.layers import head_logits, layer_norm, take_rows, tied_logits
from pallas_kernels.pins import ALL_XLA, Pins

_INIT = nn.initializers.normal(0.02)
_ZEROS = nn.initializers.zeros


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """Sizes of one GPT-2."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    layer_norm_epsilon: float
    activation: str  # a name in ``ACTIVATIONS``
    attention_scales: tuple[float, ...]  # L: factor on the scores of each layer
    tie_word_embeddings: bool
    dtype: jnp.dtype

    @property
    def lengths(self) -> tuple[int, int]:
        """See ``ModelConfig``: positions are learned."""
        return self.max_position_embeddings, self.max_position_embeddings

    def for_context(self, length: int) -> GPT2Config:
        """See ``ModelConfig``."""
        del length
        return self

    @property
    def head_dim(self) -> int:
        """H."""
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_spec(self) -> KVSpec:
        """What the layers keep per token."""
        layer = LayerKVSpec(self.num_attention_heads, self.head_dim)
        return KVSpec((layer,) * self.num_hidden_layers, self.dtype)


@nn.jit  # one trace serves every layer of a step
class GPT2Layer(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    config: GPT2Config
    scale: float

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [T, D]
        kv: LayerKV | None,
        attend: Attend,
        last: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, LayerKV | None]:  # [T, D], or with last [B, D]
        """One layer; its output is sown as ``taps/residual`` for those who ask."""
        c = self.config
        d, n, h, eps = c.hidden_size, c.num_attention_heads, c.head_dim, c.layer_norm_epsilon
        norms = self.param("norms", _init_norms, (4, d), c.dtype)
        qkv = self._linear("qkv", layer_norm(x, norms[0], norms[1], eps), 3 * d)
        qkv = qkv.reshape(-1, 3 * n, h)
        heads, kv = attend(
            qkv, kv, num_kv_heads=n, rotary=None, scale=self.scale, window=None, last=last
        )
        if last is not None:
            x = take_rows(x, last)
        x = x + self._linear("o", heads.reshape(-1, d), d)
        up = self._linear("up", layer_norm(x, norms[2], norms[3], eps), c.intermediate_size)
        x = x + self._linear("down", ACTIVATIONS[c.activation](up), d)
        self.sow("taps", "residual", x)
        return x, kv

    def _linear(self, name: str, x: jax.Array, width: int) -> jax.Array:  # [T, in] -> [T, width]
        dtype = self.config.dtype
        weight = self.param(name, _INIT, (x.shape[-1], width), dtype)
        return x @ weight + self.param(name + "_bias", _ZEROS, (width,), dtype)


class GPT2(nn.Module):
    """Tokens to hidden states (``__call__``), hidden states to logits (``unembed``)."""

    config: GPT2Config

    def setup(self) -> None:
        """Declare the parameters that both methods need."""
        c = self.config
        d, length = c.hidden_size, c.max_position_embeddings
        self.embed = self.param("embed", _INIT, (c.vocab_size, d), c.dtype)
        self.positions = self.param("positions", _INIT, (length, d), c.dtype)
        self.layers = [GPT2Layer(c, scale) for scale in c.attention_scales]
        self.final_norm = self.param("final_norm", _init_norms, (2, d), c.dtype)
        if not c.tie_word_embeddings:
            self.lm_head = self.param("lm_head", _INIT, (d, c.vocab_size), c.dtype)

    def __call__(
        self,
        token_ids: jax.Array,  # int32[T]
        positions: jax.Array,  # int32[T]
        kv: KVState | None,
        attend: Attend,
        pins: Pins = ALL_XLA,
        last: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, KVState | None]:  # [T, D], or with last [B, D]
        """Hidden states after the final norm, and the KV state with this step's tokens in it."""
        del pins  # no kernels outside of attention
        x = take_rows(self.embed, token_ids) + take_rows(self.positions, positions)
        new_kv: list[LayerKV | None] = []
        for i, layer in enumerate(self.layers):
            wanted = last if layer is self.layers[-1] else None
            x, layer_kv = layer(x, None if kv is None else kv[i], attend, wanted)
            new_kv.append(layer_kv)
        weight, bias = self.final_norm
        hidden = layer_norm(x, weight, bias, self.config.layer_norm_epsilon)
        return hidden, None if kv is None else tuple(new_kv)  # type: ignore[return-value]

    def unembed(self, hidden: jax.Array) -> jax.Array:  # [..., D] -> float32[..., V]
        """Logits."""
        if self.config.tie_word_embeddings:
            return tied_logits(hidden, self.embed)
        return head_logits(hidden, self.lm_head)


def config_from_hf(config: Mapping[str, Any], dtype: jnp.dtype) -> GPT2Config:
    """Raises ``ConfigError`` naming the key that is missing or asks for something else."""
    hf.supported_only(config, "add_cross_attention", False)
    hidden_size = _size(config, "n_embd", "hidden_size")
    num_heads = _size(config, "n_head", "num_attention_heads")
    num_layers = _size(config, "n_layer", "num_hidden_layers")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config key 'n_embd' {hidden_size} is not a multiple of 'n_head' {num_heads}"
        )
    return GPT2Config(
        vocab_size=hf.positive_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.positive_int(config, "n_inner", 4 * hidden_size),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=_size(config, "n_positions", "max_position_embeddings"),
        layer_norm_epsilon=hf.positive_float(config, "layer_norm_epsilon", 1e-5),
        activation=hf.activation(config, "activation_function", "gelu_new"),
        attention_scales=_attention_scales(config, hidden_size // num_heads, num_layers),
        tie_word_embeddings=hf.flag(config, "tie_word_embeddings", True),
        dtype=dtype,
    )


def _size(config: Mapping[str, Any], key: str, other: str) -> int:
    """A size under GPT-2's own name, or else the one that other families give it."""
    return hf.positive_int(config, key, config.get(other))


def _attention_scales(config: Mapping[str, Any], head_dim: int, layers: int) -> tuple[float, ...]:
    """The factor on the attention scores of each layer."""
    scale = head_dim**-0.5 if hf.flag(config, "scale_attn_weights", True) else 1.0
    if hf.flag(config, "scale_attn_by_inverse_layer_idx", False):
        return tuple(scale / (i + 1) for i in range(layers))
    return (scale,) * layers


def tensor_rules(config: GPT2Config) -> tuple[TensorRule, ...]:
    """Where each parameter comes from, by the names of the released checkpoints."""
    v, d, length = config.vocab_size, config.hidden_size, config.max_position_embeddings
    rules = [
        TensorRule("embed", (v, d), ("wte.weight",), ((v, d),), as_is),
        TensorRule("positions", (length, d), ("wpe.weight",), ((length, d),), as_is),
        TensorRule("final_norm", (2, d), ("ln_f.weight", "ln_f.bias"), ((d,), (d,)), stack),
    ]
    if not config.tie_word_embeddings:
        head = TensorRule("lm_head", (d, v), ("lm_head.weight",), ((v, d),), join_outputs)
        rules.append(head)
    linears = (
        ("qkv", "attn.c_attn", d, 3 * d),
        ("o", "attn.c_proj", d, d),
        ("up", "mlp.c_fc", d, config.intermediate_size),
        ("down", "mlp.c_proj", config.intermediate_size, d),
    )
    norms = ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")
    for i in range(config.num_hidden_layers):
        param, source = f"layers_{i}/", f"h.{i}."
        for name, tensor, width_in, width_out in linears:
            weight, bias = source + tensor + ".weight", source + tensor + ".bias"
            shape, width = (width_in, width_out), (width_out,)
            rules.append(TensorRule(param + name, shape, (weight,), (shape,), as_is))
            rules.append(TensorRule(param + name + "_bias", width, (bias,), (width,), as_is))
        norm_sources = tuple(source + name for name in norms)
        rules.append(TensorRule(param + "norms", (4, d), norm_sources, ((d,),) * 4, stack))
    return tuple(rules)


def _init_norms(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Weights one and biases zero, row after row."""
    del key
    return jnp.zeros(shape, dtype).at[::2].set(1)


FAMILY = ModelFamily(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    config_from_hf=config_from_hf,
    module=GPT2,
    tensor_rules=tensor_rules,
    kv_spec=lambda config: config.kv_spec,
    ignored_tensors=(r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
