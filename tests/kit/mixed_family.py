"""A model family defined outside the library, with every kind of layer that the step allows.

Its layers mix a window of keys and values, a latent per token, a recurrent state per sequence, and
a toy mixture of experts with 8-bit weights and scales. The library does not contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.base import Model, ModelFamily, Params, TensorRule
from jaxinfer.models.rules import as_is
from jaxinfer.models.tree import nested
from jaxinfer.nn.context import StepContext
from jaxinfer.nn.decoder_config import AttentionConfig, DecoderSpec, FeedForwardConfig, LayerSpec
from jaxinfer.nn.layers import take_rows
from jaxinfer.nn.linear import Norm, Stream, linear, linear_of_norm, normalised
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import Entry, LayerArrays, LayerState

D, C, E, V, WINDOW = 32, 12, 3, 320, 7
_INIT = nn.initializers.normal(0.02)
_DECAY = 0.7


@dataclass(frozen=True)
class LatentSpec:
    """Attention of one head whose keys and values are one latent a token."""

    rope: RopeConfig | None = None

    def state(self, dtype: jnp.dtype) -> LayerState:
        return LayerState((Entry("latent", (C,), dtype),))

    def module(self) -> nn.Module:
        return Latent()


class Latent(nn.Module):
    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, LayerArrays | None]:
        w = self.param("latent", _INIT, (D, 2 * C), jnp.float32)
        stream, both = linear_of_norm(stream, norm, w, ctx)
        query, latent = jnp.split(both, 2, axis=1)
        if state is None:
            context = jnp.broadcast_to(latent, (len(latent), *latent.shape))  # [T, T, C]
        else:
            assert ctx.rows is not None
            pages = ctx.pages[0]
            pool = state["latent"]
            flat = pool.reshape(-1, C).at[pages.slot_mapping].set(latent)
            state = {"latent": flat.reshape(pool.shape)}
            of_rows = state["latent"][pages.page_table]  # [B, M, page_size, C]
            context = of_rows.reshape(len(of_rows), -1, C)[ctx.rows.of_token]
        seen = jnp.arange(context.shape[1])[None] <= ctx.positions[:, None]
        scores = jnp.where(seen, jnp.einsum("TC,TSC->TS", query, context), -jnp.inf)
        mixed = jnp.einsum("TS,TSC->TC", jax.nn.softmax(scores), context)
        out = linear(mixed, self.param("o", _INIT, (C, D), jnp.float32), ctx)
        if only is None:
            return stream.x, out, state
        return stream.take(only), take_rows(out, only), state


@dataclass(frozen=True)
class RecurrentSpec:
    """A leaky sum over the tokens of a sequence."""

    rope: RopeConfig | None = None

    def state(self, dtype: jnp.dtype) -> LayerState:
        return LayerState(per_slot=(Entry("sum", (D,), dtype),))

    def module(self) -> nn.Module:
        return Recurrent()


class Recurrent(nn.Module):
    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, LayerArrays | None]:
        w = self.param("into", _INIT, (D, D), jnp.float32)
        stream, added = linear_of_norm(stream, norm, w, ctx)
        if state is None or ctx.rows is None:
            slots, real = jnp.zeros(len(added), jnp.int32), jnp.ones(len(added), bool)
            sums = jnp.zeros((1, D))
        else:
            slots, real, sums = ctx.rows.slots[ctx.rows.of_token], ctx.rows.is_token, state["sum"]

        def token(sums: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
            slot, is_token, position, value = one
            before = jnp.where(position == 0, 0.0, sums[slot])
            now = jnp.where(is_token, _DECAY * before + value, sums[slot])
            return sums.at[slot].set(now), now

        sums, each = jax.lax.scan(token, sums, (slots, real, ctx.positions, added))
        out = linear(jnp.tanh(each), self.param("o", _INIT, (D, D), jnp.float32), ctx)
        state = None if state is None else {"sum": sums}
        if only is None:
            return stream.x, out, state
        return stream.take(only), take_rows(out, only), state


@dataclass(frozen=True)
class ExpertsSpec:
    """One of E matrices for each token, in 8 bits with a scale each."""

    def module(self) -> nn.Module:
        return Experts()


class Experts(nn.Module):
    @nn.compact
    def __call__(self, stream: Stream, norm: Norm, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        stream, h = normalised(stream, norm, ctx)
        scores = jax.nn.softmax(linear(h, self.param("router", _INIT, (D, E), jnp.float32), ctx))
        weights = self.param("experts", _experts)
        best = jnp.argmax(scores, axis=1)
        matrix = (
            weights["values"][best].astype(jnp.float32) * weights["scales"][best][:, None, None]
        )
        out = jnp.einsum("TD,TDF->TF", h, matrix) * jnp.max(scores, axis=1)[:, None]
        return stream.x, out


def _experts(key: jax.Array) -> dict[str, jax.Array]:
    del key
    return {"values": jnp.zeros((E, D, D), jnp.int8), "scales": jnp.ones(E)}


@dataclass(frozen=True, kw_only=True)
class MixedConfig:
    """``kinds`` names the mixer of each layer."""

    kinds: tuple[str, ...]
    vocab_size: int = V
    hidden_size: int = D
    max_position_embeddings: int = 512
    dtype: jnp.dtype = jnp.dtype(jnp.float32)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.kinds)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.max_position_embeddings, self.max_position_embeddings

    def for_context(self, length: int) -> MixedConfig:
        del length
        return self

    @property
    def decoder(self) -> DecoderSpec:
        attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 8**-0.5}
        mixers: dict[str, Any] = {
            "full": AttentionConfig(**attention, rope=RopeConfig(8, 1e4, None)),
            "window": AttentionConfig(**attention, rope=RopeConfig(8, 1e3, None), window=WINDOW),
            "latent": LatentSpec(),
            "recurrent": RecurrentSpec(),
        }
        dense = FeedForwardConfig(width=48, activation="silu", gated=True)
        return DecoderSpec(
            vocab_size=V,
            hidden_size=D,
            layers=tuple(
                LayerSpec(mixers[kind], ExpertsSpec() if i % 2 else dense)
                for i, kind in enumerate(self.kinds)
            ),
            norm="rms",
            norm_eps=1e-5,
            tie_word_embeddings=True,
            dtype=self.dtype,
        )


SHAPES = {
    "full": {"qkv": (D, 64), "o": (32, D)},
    "window": {"qkv": (D, 64), "o": (32, D)},
    "latent": {"latent": (D, 2 * C), "o": (C, D)},
    "recurrent": {"into": (D, D), "o": (D, D)},
}
DENSE = {"gate_up": (D, 96), "down": (48, D)}
EXPERTS = {"router": (D, E), "experts/values": (E, D, D), "experts/scales": (E,)}


def tensor_rules(config: MixedConfig) -> tuple[TensorRule, ...]:
    """Every parameter is a tensor of its own name."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (V, D), "final_norm": (D,)}
    for i, kind in enumerate(config.kinds):
        own = {"norms": (2, D), **SHAPES[kind], **(EXPERTS if i % 2 else DENSE)}
        shapes |= {f"layers_{i}/{name}": shape for name, shape in own.items()}
    return tuple(
        TensorRule(
            name, shape, (name,), (shape,), as_is, jnp.dtype(jnp.int8) if "values" in name else None
        )
        for name, shape in shapes.items()
    )


FAMILY = ModelFamily("mixed", ("MixedForTests",), lambda *_: MixedConfig(kinds=()), tensor_rules)


def mixed_model(*kinds: str) -> tuple[Model, Params]:
    """A model with these mixers, and random parameters with which every part has an effect."""
    model = Model(FAMILY, "MixedForTests", MixedConfig(kinds=kinds))
    rng = np.random.default_rng(1)
    params = {}
    for rule in model.tensor_rules:
        noise = rng.standard_normal(rule.shape).astype(np.float32)
        if "norm" in rule.param:
            noise = 1 + 0.2 * noise
        elif rule.param.endswith("values"):
            noise = np.clip(noise * 40, -127, 127)
        elif rule.param.endswith("scales"):
            noise = 0.008 + 0.002 * np.abs(noise)
        elif rule.param != "embed":
            noise = noise * 1.5 / rule.shape[0] ** 0.5
        params[rule.param] = jnp.asarray(noise, rule.dtype or jnp.float32)
    return model, nested(params)
