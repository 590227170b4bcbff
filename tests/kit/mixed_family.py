"""A model family defined outside the library, with every kind of layer that the step allows.

Its layers mix a window of keys and values, a latent per token, a summary of every few tokens, a
recurrent state per sequence, and a toy mixture of experts with 8-bit weights and scales. It has
executables of its own beside the step. The library does not contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.base import Model, ModelFamily, Params
from jaxinfer.models.params import ParamSpec, as_is, nested
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.context import Pages, Rows, StepContext
from jaxinfer.nn.decoder_config import (
    AttentionConfig,
    DecoderSpec,
    FeedForwardConfig,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
)
from jaxinfer.nn.linear import Norm, Stream, linear, normalised
from jaxinfer.nn.mixers.compressed_spec import (
    CompressedAttentionConfig,
    CompressorConfig,
    EntryIndexerConfig,
)
from jaxinfer.nn.placement import Fused
from jaxinfer.nn.rope import RopeConfig
from jaxinfer.nn.state import (
    Entry,
    LayerArrays,
    LayerState,
    PagedKind,
    read_states,
    stored_states,
)
from jaxinfer.nn.weight import param, take_rows, weight
from kit.checkpoints import Tensors, built_arrays
from kit.outside_calls import FORGET, TALLY

D, C, E, V, WINDOW = 32, 12, 4, 320, 7
S, BLOCK = 6, 4
INDEXER = EntryIndexerConfig(num_heads=16, head_dim=8, top_k=3)
_DECAY = 0.7


@dataclass(frozen=True)
class LatentSpec(MixerSpec):
    """Attention of one head whose keys and values are one latent a token."""

    def state(self, dtype: jnp.dtype) -> LayerState:
        return LayerState((PagedKind((Entry("latent", (C,), dtype),)),))

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
        both, stream, _ = linear(stream, weight(self, "latent"), ctx, norm=norm)
        query, latent = jnp.split(both, 2, axis=1)
        if state is None:
            context = jnp.broadcast_to(latent, (len(latent), *latent.shape))  # [T, T, C]
        else:
            assert ctx.rows is not None
            state = {"latent": _appended(state["latent"], ctx.pages[0], latent)}
            context = _of_tokens(state["latent"], ctx.pages[0], ctx.rows)
        seen = jnp.arange(context.shape[1])[None] <= ctx.positions[:, None]
        scores = jnp.where(seen, jnp.einsum("TC,TSC->TS", query, context), -jnp.inf)
        mixed = jnp.einsum("TS,TSC->TC", jax.nn.softmax(scores), context)
        out = linear(mixed, weight(self, "o"), ctx).y
        if only is None:
            return stream.x, out, state
        return stream.take(only), take_rows(out, only), state


def _appended(pool: jax.Array, pages: Pages, entries: jax.Array) -> jax.Array:
    """The pool [P, page_size, ...] with the entries [T, ...] of a step."""
    return pool.reshape(-1, *pool.shape[2:]).at[pages.slot_mapping].set(entries).reshape(pool.shape)


def _of_tokens(pool: jax.Array, pages: Pages, rows: Rows) -> jax.Array:  # [T, M * page_size, ...]
    """The entries of the context of each token's row."""
    found = pool[pages.page_table]
    return found.reshape(len(found), -1, *pool.shape[2:])[rows.of_token]


@dataclass(frozen=True)
class CompressedSpec(MixerSpec):
    """Attention to the latents of the last tokens, and to a summary of each ``BLOCK`` tokens.

    So its state has two paged kinds. A summary is a vector and its scale, which are two entries.
    """

    def state(self, dtype: jnp.dtype) -> LayerState:
        summary = (Entry("summary", (S,), dtype), Entry("scale", (), jnp.dtype(jnp.float32)))
        near = PagedKind((Entry("latent", (C,), dtype),), WINDOW)
        return LayerState((near, PagedKind(summary, tokens_per_entry=BLOCK)))

    def module(self) -> nn.Module:
        return Compressed()


class Compressed(nn.Module):
    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, LayerArrays | None]:
        both, stream, _ = linear(stream, weight(self, "latent"), ctx, norm=norm)
        query, latent = jnp.split(both, 2, axis=1)
        into, back = param(self, "into"), param(self, "back")
        if state is None:
            count, at = len(latent), ctx.positions
            blocks = latent[: count // BLOCK * BLOCK].reshape(-1, BLOCK, C)
            near = jnp.broadcast_to(latent, (count, *latent.shape))  # [T, T, C]
            far = jnp.broadcast_to(blocks.mean(1) @ into, (count, len(blocks), S))
        else:
            assert ctx.rows is not None
            rows, (near_pages, far_pages) = ctx.rows, ctx.pages
            latents = _appended(state["latent"], near_pages, latent)
            near = _of_tokens(latents, near_pages, rows)
            passed = ctx.positions[rows.last_tokens] + 1 - near_pages.seq_lens
            # where each token is in its context; padding sees something too, so that it is finite
            at = jnp.maximum(ctx.positions - passed[rows.of_token], 0)
            block = at[:, None] - jnp.arange(BLOCK)[::-1]
            summary = jnp.take_along_axis(near, block[..., None], axis=1).mean(1) @ into
            scale = jnp.maximum(jnp.abs(summary).max(1), 1e-30)  # of padding it is 0
            scales = _appended(state["scale"], far_pages, scale)
            summaries = _appended(state["summary"], far_pages, summary / scale[:, None])
            far = _of_tokens(summaries, far_pages, rows)
            far = far * _of_tokens(scales, far_pages, rows)[..., None]
            state = {"latent": latents, "summary": summaries, "scale": scales}
        distance = at[:, None] - jnp.arange(near.shape[1])[None]
        whole = jnp.arange(far.shape[1])[None] < (ctx.positions[:, None] + 1) // BLOCK
        seen = jnp.concatenate(((distance >= 0) & (distance < WINDOW), whole), axis=1)
        context = jnp.concatenate((near, far @ back), axis=1)
        scores = jnp.where(seen, jnp.einsum("TC,TSC->TS", query, context), -jnp.inf)
        mixed = jnp.einsum("TS,TSC->TC", jax.nn.softmax(scores), context)
        out = linear(mixed, weight(self, "o"), ctx).y
        if only is None:
            return stream.x, out, state
        return stream.take(only), take_rows(out, only), state


@dataclass(frozen=True)
class RecurrentSpec(MixerSpec):
    """A leaky sum over the tokens of a sequence, as if ``align`` tokens were computed at a time."""

    align: int = 1

    def state(self, dtype: jnp.dtype) -> LayerState:
        return LayerState(per_slot=(Entry("sum", (D,), dtype),), align=self.align)

    def module(self) -> nn.Module:
        return Recurrent(self.align)


class Recurrent(nn.Module):
    align: int

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, LayerArrays | None]:
        added, stream, _ = linear(stream, weight(self, "into"), ctx, norm=norm)
        if state is None or ctx.rows is None:
            of_token, real = jnp.zeros(len(added), jnp.int32), jnp.ones(len(added), bool)
            sums = jnp.zeros((1, D))
        else:
            of_token, real = ctx.rows.of_token, ctx.rows.is_token
            sums = read_states(state["sum"], ctx.rows)
            # rows that the engine must not plan have no result
            prompts = ctx.rows.begins[ctx.num_decodes :] % self.align
            sums = sums.at[ctx.num_decodes :].set(
                jnp.where((prompts == 0)[:, None], sums[ctx.num_decodes :], jnp.nan)
            )

        def token(sums: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
            row, is_token, value = one
            now = jnp.where(is_token, _DECAY * sums[row] + value, sums[row])
            return sums.at[row].set(now), now

        sums, each = jax.lax.scan(token, sums, (of_token, real, added))
        out = linear(jnp.tanh(each), weight(self, "o"), ctx).y
        if state is not None:
            assert ctx.rows is not None
            saved, saves = None, ctx.rows.saves
            if saves is not None:
                aligned = (saves.num_tokens % self.align == 0)[..., None]
                saved = jnp.where(aligned, each[saves.last_tokens(ctx.rows)], jnp.nan)
            state = {"sum": stored_states(state["sum"], ctx.rows, sums, saved)}
        if only is None:
            return stream.x, out, state
        return stream.take(only), take_rows(out, only), state


@dataclass(frozen=True)
class ExpertsSpec(FeedForwardSpec):
    """One of E matrices for each token, in 8 bits with a scale each."""

    def module(self) -> nn.Module:
        return Experts()


class Experts(nn.Module):
    @nn.compact
    def __call__(self, stream: Stream, norm: Norm, ctx: StepContext) -> tuple[jax.Array, jax.Array]:
        stream, h = normalised(stream, norm, ctx)
        scores = jax.nn.softmax(linear(h, weight(self, "router"), ctx).y)
        weights = param(self, "experts")
        best = jnp.argmax(scores, axis=1)
        matrix = (
            weights["values"][best].astype(jnp.float32) * weights["scales"][best][:, None, None]
        )
        out = jnp.einsum("TD,TDF->TF", h, matrix) * jnp.max(scores, axis=1)[:, None]
        return stream.x, out


def compressed_attention(compressor: CompressorConfig) -> CompressedAttentionConfig:
    """DeepSeek-V4's attention."""
    return CompressedAttentionConfig(
        num_heads=2,
        head_dim=8,
        query_rank=12,
        window=WINDOW,
        num_groups=2,
        group_rank=8,
        rope=RopeConfig(4, 1e3),
        compressor=compressor,
    )


def mixed_decoder(*kinds: str) -> DecoderSpec:
    """A decoder; ``kinds`` names the mixer of each layer."""
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 8**-0.5}
    mixers: dict[str, MixerSpec] = {
        "full": AttentionConfig(**attention, rope=RopeConfig(8, 1e4, None)),
        "window": AttentionConfig(**attention, rope=RopeConfig(8, 1e3, None), window=WINDOW),
        "latent": LatentSpec(),
        "compressed": CompressedSpec(),
        "recurrent": RecurrentSpec(),
        "aligned": RecurrentSpec(align=8),
        "windows": compressed_attention(CompressorConfig(ratio=16)),
        "chosen": compressed_attention(CompressorConfig(ratio=4, indexer=INDEXER)),
    }
    dense = FeedForwardConfig(width=48, activation="silu", gated=True)
    return DecoderSpec(
        vocab_size=V,
        hidden_size=D,
        layers=tuple(
            LayerSpec(mixers[kind], ExpertsSpec() if i % 2 else dense)
            for i, kind in enumerate(kinds)
        ),
        lengths=(512, 512),
        norm="rms",
        norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype=jnp.dtype(jnp.float32),
    )


ARRAYS = {  # of each kind of layer; a weight of which nothing else is said is a tensor as stored
    "full": {
        "qkv": ArraySpec((D, 64), (None, Fused("heads", (32, 16, 16)))),
        "o": ArraySpec((32, D), ("heads", None)),
    },
    "latent": {
        "latent": ArraySpec((D, 2 * C), (None, None)),
        "o": ArraySpec((C, D), (None, None)),
    },
    "compressed": {
        "latent": ArraySpec((D, 2 * C), (None, None)),
        "into": ArraySpec((C, S), (None, None)),
        "back": ArraySpec((S, C), (None, None)),
        "o": ArraySpec((C, D), (None, None)),
    },
    "recurrent": {
        "into": ArraySpec((D, D), (None, None)),
        "o": ArraySpec((D, D), (None, None)),
    },
    "windows": {
        "q_kv_a": ArraySpec((D, 12 + 8), (None, None)),
        "q_norm": ArraySpec((12,), (None,)),
        "kv_norm": ArraySpec((8,), (None,)),
        "q_b": ArraySpec((12, 16), (None, "heads")),
        "sinks": ArraySpec((2,), ("heads",)),
        "o_a": ArraySpec((2, 8, 8), ("heads", None, None)),
        "o_b": ArraySpec((16, D), ("heads", None)),
        "compress": ArraySpec((D, 16), (None, None)),
        "compress_bias": ArraySpec((16, 8), (None, None)),
        "compress_norm": ArraySpec((8,), (None,)),
    },
    "dense": {
        "gate_up": ArraySpec((D, 96), (None, Fused("ffn", (48, 48)))),
        "down": ArraySpec((48, D), ("ffn", None)),
    },
    "experts": {"router": ArraySpec((D, E), (None, None))},
}
ARRAYS["chosen"] = ARRAYS["windows"] | {
    "compress": ArraySpec((D, 32), (None, None)),
    "compress_bias": ArraySpec((4, 16), (None, None)),
    "index_compress": ArraySpec((D, 32), (None, None)),
    "index_compress_bias": ArraySpec((4, 16), (None, None)),
    "index_compress_norm": ArraySpec((8,), (None,)),
    "index_q": ArraySpec((12, 16 * 8), (None, None)),
    "index_weights": ArraySpec((16, D), (None, None)),
}
EXPERTS = {
    "values": ArraySpec((E, D, D), ("experts", None, None), jnp.dtype(jnp.int8)),
    "scales": ArraySpec((E,), ("experts",)),
}


def quantised(matrix: np.ndarray) -> dict[str, np.ndarray]:  # [D, D] -> int8[D, D], float32[]
    """The nearest multiples of a 127th of the largest magnitude."""
    scale = np.abs(matrix).max() / 127
    return {"values": np.rint(matrix / scale), "scales": scale}


def _kind_of(mixer: Any) -> str:
    return "windows" if mixer.compressor.indexer is None else "chosen"


def param_specs(config: DecoderSpec) -> tuple[ParamSpec, ...]:
    """Every array is a tensor of its own name, but for experts: there is a matrix for each."""
    arrays = {"embed": ArraySpec((V, D), ("vocab", None)), "final_norm": ArraySpec((D,), (None,))}
    experts: list[ParamSpec] = []
    names = {
        AttentionConfig: "full",
        LatentSpec: "latent",
        CompressedSpec: "compressed",
        RecurrentSpec: "recurrent",
    }
    for i, spec in enumerate(config.layers):
        layer = f"layers_{i}/"
        mixer = names.get(type(spec.mixer)) or _kind_of(spec.mixer)
        ffn = "experts" if i % 2 else "dense"
        own = {"norms": ArraySpec((2, D), (None, None)), **ARRAYS[mixer], **ARRAYS[ffn]}
        arrays |= {layer + name: array for name, array in own.items()}
        if ffn == "experts":
            sources = tuple(Source(f"{layer}experts/{e}", (D, D)) for e in range(E))
            experts.append(ParamSpec(layer + "experts", EXPERTS, sources, quantised, pieces=E))
    stored = (
        ParamSpec(path, array, (Source(path, array.shape),), as_is)
        for path, array in arrays.items()
    )
    return (*stored, *experts)


FAMILY = ModelFamily("mixed", lambda *_: mixed_decoder(), param_specs, calls=(FORGET, TALLY))


def mixed_model(*kinds: str) -> tuple[Model, Params]:
    """A model with these mixers, and random parameters with which every part has an effect."""
    model = Model(FAMILY, "MixedForTests", mixed_decoder(*kinds))
    arrays = built_arrays(model, mixed_tensors(model))
    return model, nested({path: jnp.asarray(array) for path, array in arrays.items()})


def mixed_tensors(model: Model) -> Tensors:
    """A checkpoint of those parameters."""
    rng = np.random.default_rng(1)
    tensors: Tensors = {}
    for name, shape, *_ in (source for spec in model.param_specs for source in spec.sources):
        noise = rng.standard_normal(shape).astype(np.float32)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif name != "embed":
            noise = noise * 1.5 / shape[0] ** 0.5
        tensors[name] = noise
    return tensors
