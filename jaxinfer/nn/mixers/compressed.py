"""Attention to the last tokens and to compressed ones; its parameters are in ``compressed_spec``.

Each token reads entries of its own, so decode rows and prompts differ only in the windows that they
compress (``nn.mixers.windows``). In the dense form each pool is one page with the entries of the
sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Angles, Pages, PlainOutput, Rows, StepContext
from jaxinfer.nn.linear import Norm, Stream, block_output, linear
from jaxinfer.nn.mixers.compressed_spec import (
    FAR,
    KEY,
    NEAR,
    OPEN,
    OPEN_KEY,
    CompressedAttentionConfig,
    CompressorConfig,
)
from jaxinfer.nn.mixers.recurrent import empty_state, whole_sequence
from jaxinfer.nn.mixers.windows import compressed, windows_of, with_windows
from jaxinfer.nn.rope import rope_tables
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import Matmul, param, take_rows, weight
from pallas_kernels.compressed_attention.api import CompressedAttentionArgs, compressed_attention
from pallas_kernels.index_topk.api import IndexTopkArgs, index_topk
from pallas_kernels.kv_append.xla import written
from pallas_kernels.lib.numerics import mean_last, rms_norm, rotate


class _Tokens(NamedTuple):
    """The projections of a step's tokens; queries are those of the tokens that attend."""

    h: Any  # [T, D]: normalised, in a layer that compresses
    kv: jax.Array  # [T, H]: rotated
    latent: jax.Array  # [Tq, Q]: of queries, after its norm
    q: jax.Array  # [Tq, N, H]: rotated


class _Place(NamedTuple):
    """Where the entries of a step's rows are: those of its context, or those of the dense form."""

    rows: Rows
    pages: tuple[Pages, ...]  # of tokens, and of windows if there can be whole ones
    is_dense: bool

    @classmethod
    def of(cls, ctx: StepContext, c: CompressedAttentionConfig) -> _Place:
        """The place of the entries of a step."""
        if ctx.rows is not None:
            return cls(ctx.rows, ctx.pages, is_dense=False)
        positions, table = ctx.positions, jnp.zeros((1, 1), jnp.int32)
        count, sizes = len(positions), [1]
        if c.compressor is not None and count >= c.compressor.ratio:
            sizes.append(c.compressor.ratio)
        pages = tuple([Pages(positions, table, jnp.full(1, count // n)) for n in sizes])
        return cls(whole_sequence(count), pages, is_dense=True)


class CompressedAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: CompressedAttentionConfig

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        norm: Norm,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None = None,  # int32[B]
    ) -> tuple[jax.Array, PlainOutput, LayerArrays | None]:
        """See ``mixers.attention.Attention``."""
        c, place = self.config, _Place.of(ctx, self.config)
        stream, tokens = self._projected(stream, norm, ctx, only)
        arrays = dict(state or {})
        near = place.pages[0]
        if place.is_dense:
            arrays[NEAR] = tokens.kv[None]
        else:
            arrays[NEAR] = _written(arrays[NEAR], tokens.kv, near.slot_mapping)
        far: dict[str, Any] = {}
        if c.compressor is not None and len(place.pages) > 1:
            arrays |= self._compressed(c.compressor, tokens.h, arrays, place, ctx)
            far = {"far_pages": arrays[FAR], "far_table": place.pages[1].page_table}
            far["reads"] = self._reads(c.compressor, tokens, arrays, place, ctx, only)
        rows, last = (x if only is None else x[only] for x in _own_entries(place, ctx.positions))
        args = CompressedAttentionArgs(
            q=tokens.q,
            pages=arrays[NEAR],
            page_table=near.page_table,
            sinks=param(self, "sinks"),
            rows=rows,
            last=last,
            **far,
            window=c.window,
            scale=c.scale,
        )
        out = compressed_attention(args, ctx.pinned("compressed_attention"))
        x = stream.x if only is None else stream.take(only)
        return x, self._output(out, ctx, only), None if place.is_dense else arrays

    def _projected(
        self, stream: Stream, norm: Norm, ctx: StepContext, only: jax.Array | None
    ) -> tuple[Stream, _Tokens]:
        """The stream with its delta added, and the projections of its tokens."""
        c, keep, fixed = self.config, self.config.compressor is not None, ctx.pins.invariant
        both, stream, h = linear(stream, weight(self, "q_kv_a"), ctx, norm=norm, keep=keep)
        latent, kv = both[:, : c.query_rank], both[:, c.query_rank :]
        kv = rms_norm(kv, param(self, "kv_norm"), c.norm_eps, fixed=fixed)
        latent = rms_norm(latent, param(self, "q_norm"), c.norm_eps, fixed=fixed)
        latent = latent if only is None else take_rows(latent, only)
        q = linear(latent, weight(self, "q_b"), ctx).y.reshape(len(latent), c.num_heads, c.head_dim)
        q32 = q.astype(jnp.float32)
        square = mean_last(jnp.square(q32), fixed=fixed)
        q = (q32 * jax.lax.rsqrt(square + c.norm_eps)).astype(q.dtype)
        angles = ctx.angles[0]
        kv = turned(kv[:, None], angles)[:, 0]
        return stream, _Tokens(h, kv, latent, turned(q, _taken(angles, only)))

    def _compressed(
        self,
        c: CompressorConfig,
        h: jax.Array,  # [T, D]
        arrays: LayerArrays,
        place: _Place,
        ctx: StepContext,
    ) -> LayerArrays:
        """The pools with the entries of the windows that the step completes, and with their keys,
        and the states of unfinished windows.
        """
        windows = windows_of(place.rows, ctx.positions, ctx.num_decodes, c.ratio)
        angles = Angles(*rope_tables(self.config.rope, windows.number * c.ratio))
        kinds = [(FAR, OPEN, "compress")]
        kinds += [] if c.indexer is None else [(KEY, OPEN_KEY, "index_compress")]
        empty = empty_state(self.config.state(h.dtype)) if place.is_dense else arrays
        found: LayerArrays = {}
        for name, unfinished, prefix in kinds:
            values, gates = jnp.split(linear(h, weight(self, prefix), ctx).y, 2, axis=1)
            entries, found[unfinished] = compressed(
                values,
                gates,
                param(self, f"{prefix}_bias"),
                empty[unfinished],
                windows,
                place.rows,
                ctx.positions,
            )
            norm = param(self, f"{prefix}_norm")
            entries = rms_norm(entries, norm, self.config.norm_eps, fixed=ctx.pins.invariant)
            entries = turned(entries[:, None], angles)[:, 0].astype(h.dtype)
            if place.is_dense:
                found[name] = entries[None, : len(h) // c.ratio]
            else:
                table, count = place.pages[1].page_table, len(h)
                found[name] = with_windows(
                    arrays[name], entries, windows, table, count, c.num_pieces
                )
        return found

    def _reads(
        self,
        c: CompressorConfig,
        tokens: _Tokens,
        arrays: LayerArrays,
        place: _Place,
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> jax.Array:  # int32[Tq], or of chosen ones int32[Tq, K]
        """The number of whole windows up to each token, or those that the indexer chooses of them;
        -1 for none.
        """
        rows, of = place.rows, slice(None) if only is None else only
        whole = jnp.where(rows.is_token, (ctx.positions + 1) // c.ratio, 0)[of]
        if (index := c.indexer) is None:
            return whole
        q = linear(tokens.latent, weight(self, "index_q"), ctx).y
        q = turned(q.reshape(len(q), index.num_heads, -1), _taken(ctx.angles[0], only))
        how = Matmul(ctx.pins, wide=True)
        weights = weight(self, "index_weights", by_output=True).matmul(tokens.h[of], how)
        among = IndexTopkArgs(
            q=q,
            weights=weights * (index.num_heads * index.head_dim) ** -0.5,
            pages=arrays[KEY],
            page_table=place.pages[1].page_table,
            rows=rows.of_token[of],
            lens=whole,
            top_k=index.top_k,
        )
        # a choice has no gradient
        return index_topk(jax.lax.stop_gradient(among), ctx.pinned("index_topk"))

    def _output(
        self,
        out: jax.Array,  # [Tq, N, H]: of attention, as values are rotated
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> PlainOutput:
        """The block's output of what the heads have attended to."""
        c, angles = self.config, _taken(ctx.angles[0], only)
        out = ctx.at("z", turned(out, Angles(angles.cos, -angles.sin)))
        out = out.reshape(len(out), c.num_groups, -1)
        groups = weight(self, "o_a").dense(out.dtype)  # [G, R, N * H / G]
        out = jnp.einsum("TGI,GRI->TGR", out, groups)
        return block_output(out.reshape(len(out), -1), weight(self, "o_b"), ctx)


def _written(pool: jax.Array, entries: jax.Array, slots: jax.Array) -> jax.Array:  # [P, S, H]
    """The pool with entries [X, H] in these slots; the barrier keeps XLA from copying it."""
    return jax.lax.optimization_barrier(written(pool, entries, slots))


def _own_entries(
    place: _Place, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:  # int32[T] each
    """The row of each token, and its place among the entries that the row has; -1 for padding."""
    rows = place.rows
    of = jnp.minimum(rows.of_token, len(rows.slots) - 1)
    passed = positions[rows.last_tokens] + 1 - place.pages[0].seq_lens
    return of, jnp.where(rows.is_token, positions - passed[of], -1)


def turned(x: jax.Array, angles: Angles) -> jax.Array:  # [T, heads, H]
    """Heads whose last components rotate, each even one with the one after it."""
    first = x.shape[-1] - 2 * angles.cos.shape[-1]
    own = x[..., first:]
    own = rotate(jnp.concatenate((own[..., ::2], own[..., 1::2]), axis=-1), *angles)
    pairs = jnp.stack(jnp.split(own, 2, axis=-1), axis=-1)
    return jnp.concatenate((x[..., :first], pairs.reshape(*own.shape)), axis=-1)


def _taken(angles: Angles, only: jax.Array | None) -> Angles:
    """The rotation tables of these tokens, or of all."""
    return angles if only is None else angles.take(only)
