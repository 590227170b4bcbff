"""The decoder that most families share: pre-norm, grouped-query attention with rope, gated MLP.

Owns: the linen modules and the layout of their parameters; what is to be chosen is in
``decoder_config``. Must not know: families, checkpoint names, pages, sampling.

Layers are unrolled, with one array per layer and weight: fewer leaves cost less per dispatch, and
fused products read each activation once. A block's result joins the residual stream at the next
norm (``norm_gemm``), and until then it is handed on as ``delta``. Weights lie [in, out];
products are ``x @ w``. Parameters:

    embed [V, D]              layers_i/qkv      [D, (N + 2K) * H]   queries, keys, values
    final_norm [D]            layers_i/qkv_bias [(N + 2K) * H]      with qkv_bias
    lm_head [D, V]            layers_i/qk_norms [2, H]              with qk_norm: of q, of k
      unless tied             layers_i/o        [N * H, D]
                              layers_i/o_bias   [D]                 with o_bias
                              layers_i/gate_up  [D, 2F]             gate, up
                              layers_i/down     [F, D]
                              layers_i/gate_up_bias [2F]            with mlp_bias
                              layers_i/down_bias    [D]             with mlp_bias
                              layers_i/norms    [2, D]              before attention, before ffw
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.activations import ACTIVATIONS
from jaxinfer.nn.attention import Attend, Rotary
from jaxinfer.nn.decoder_config import DecoderConfig
from jaxinfer.nn.kv import KVState, LayerKV
from jaxinfer.nn.layers import head_logits, take_rows, tied_logits
from jaxinfer.nn.rope import rope_tables
from pallas_kernels.norm_gemm.api import norm_gemm
from pallas_kernels.numerics import add_parts
from pallas_kernels.pins import ALL_XLA, Pins
from pallas_kernels.residual_norm.api import residual_norm
from pallas_kernels.skinny_gemm.api import skinny_gemm

_INIT = nn.initializers.normal(0.02)


@partial(nn.jit, static_argnames="pins")  # one trace serves every layer of a step
class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream at the norm that follows it."""

    config: DecoderConfig
    window: int | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [T, D]
        delta: jax.Array | None,  # see ``_to_stream``; None before the first layer
        cos: jax.Array,  # float32[T, H / 2]
        sin: jax.Array,  # float32[T, H / 2]
        kv: LayerKV | None,
        attend: Attend,
        pins: Pins,
        last: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, jax.Array, LayerKV | None]:  # [T, D], see ``_to_stream``
        """One layer; its ``x + delta`` is sown as ``taps/residual`` for those who ask. With
        ``last`` (see ``Attend``) both are of those tokens alone.
        """
        c = self.config
        norms = self.param("norms", nn.initializers.ones, (2, c.hidden_size), c.dtype)
        product = partial(norm_gemm, norms=norms, eps=c.rms_norm_eps, pins=pins)
        x, heads = product(x, delta, w=self._qkv_weights(), row=0)
        heads, kv = attend(
            self._heads(heads),
            kv,
            num_kv_heads=c.num_key_value_heads,
            rotary=Rotary(cos, sin, self._qk_norms(), c.rms_norm_eps),
            scale=c.head_dim**-0.5,
            window=self.window,
            last=last,
        )
        if last is not None:
            x = take_rows(x, last)
        delta = self._to_stream("o", heads.reshape(x.shape[0], -1), pins, bias=c.o_bias)
        swiglu = c.activation == "silu" and not c.mlp_bias  # which kernels can do in one launch
        x, hidden = product(x, delta, w=self._gate_up_weights(), row=1, swiglu=swiglu)
        if not swiglu:
            hidden = self._gated(hidden)
        delta = self._to_stream("down", hidden, pins, bias=c.mlp_bias)
        self.sow("taps", "residual", add_parts(x, delta))
        return x, delta, kv

    def _qkv_weights(self) -> jax.Array:  # [D, (N + 2K) * H]
        c = self.config
        columns = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        return self.param("qkv", _INIT, (c.hidden_size, columns), c.dtype)

    def _gate_up_weights(self) -> jax.Array:  # [D, 2F]
        c = self.config
        return self.param("gate_up", _INIT, (c.hidden_size, 2 * c.intermediate_size), c.dtype)

    def _gated(self, x: jax.Array) -> jax.Array:  # [T, 2F] -> [T, F]
        """What gates and ups of one product come to, with their bias."""
        if self.config.mlp_bias:
            zeros = nn.initializers.zeros
            x = x + self.param("gate_up_bias", zeros, x.shape[1:], self.config.dtype)
        gate, up = jnp.split(x, 2, axis=-1)
        return ACTIVATIONS[self.config.activation](gate) * up

    def _heads(self, x: jax.Array) -> jax.Array:  # [T, (N + 2K) * H] -> [T, N + 2K, H]
        """Queries, keys and values of one product, with their bias."""
        if self.config.qkv_bias:
            zeros = nn.initializers.zeros
            x = x + self.param("qkv_bias", zeros, x.shape[1:], self.config.dtype)
        return x.reshape(x.shape[0], -1, self.config.head_dim)

    def _qk_norms(self) -> jax.Array | None:  # [2, H]
        c = self.config
        if not c.qk_norm:
            return None
        return self.param("qk_norms", nn.initializers.ones, (2, c.head_dim), c.dtype)

    def _to_stream(
        self,
        name: str,
        x: jax.Array,  # [T, in]
        pins: Pins,
        *,
        bias: bool = False,
    ) -> jax.Array:  # [T, D], or float32[S, T, D] without ``bias``
        """What a block adds to the residual stream, in a form that ``norm_gemm`` takes."""
        d, dtype = self.config.hidden_size, self.config.dtype
        weights = self.param(name, _INIT, (x.shape[-1], d), dtype)
        out = skinny_gemm(x, weights, split=not bias, impl=pins.of("skinny_gemm"))
        if bias:
            out = out + self.param(name + "_bias", nn.initializers.zeros, (d,), dtype)
        return out


class Decoder(nn.Module):
    """Tokens to hidden states (``__call__``), hidden states to logits (``unembed``)."""

    config: DecoderConfig

    def setup(self) -> None:
        """Declare the parameters that both methods need."""
        c = self.config
        self.embed = self.param("embed", _INIT, (c.vocab_size, c.hidden_size), c.dtype)
        self.layers = [DecoderLayer(c, window) for window in c.windows]
        self.final_norm = self.param("final_norm", nn.initializers.ones, (c.hidden_size,), c.dtype)
        if not c.tie_word_embeddings:
            self.lm_head = self.param("lm_head", _INIT, (c.hidden_size, c.vocab_size), c.dtype)

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
        c = self.config
        x = take_rows(self.embed, token_ids)
        cos, sin = rope_tables(c.rope, positions)
        new_kv: list[LayerKV | None] = []
        delta = None
        for i, layer in enumerate(self.layers):
            layer_kv = None if kv is None else kv[i]
            wanted = last if layer is self.layers[-1] else None
            x, delta, layer_kv = layer(x, delta, cos, sin, layer_kv, attend, pins=pins, last=wanted)
            new_kv.append(layer_kv)
        weights, impl = self.final_norm[None], pins.of("residual_norm")
        _, hidden = residual_norm(x, delta, weights, row=0, eps=c.rms_norm_eps, impl=impl)
        return hidden, None if kv is None else tuple(new_kv)  # type: ignore[return-value]

    def unembed(self, hidden: jax.Array) -> jax.Array:  # [..., D] -> float32[..., V]
        """Logits."""
        if self.config.tie_word_embeddings:
            return tied_logits(hidden, self.embed)
        return head_logits(hidden, self.lm_head)
