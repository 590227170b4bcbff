"""Embeddings of n-grams that a layer adds to residual streams; see ``ngram_spec``.

Parameters of ``NGrams``, for n streams of width D, rows of all functions of P elements, W taps:

    table [V, E]   key_value [P, (n + 1) * D]: a key for each stream, then the value
    norms float32[3, n * D]: of keys, of streams, of the convolution's inputs   conv [W, n * D]

Source: ``modeling_qwen4_exp`` of Hugging Face transformers. Parameters of ``NGramMean``, for n
functions with rows of P elements:

    table [V, P]   projections [n * D, P]: from the rows of each function to the stream
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import Rows, StepContext, TokenIds
from jaxinfer.nn.linear import Stream, linear
from jaxinfer.nn.mixers.recurrent import convolved, started
from jaxinfer.nn.ngram_hash import ngram_rows, polynomial_rows
from jaxinfer.nn.ngram_spec import LAST_IDS, LAST_INPUTS, NGramConfig, NGramMeanConfig
from jaxinfer.nn.state import LayerArrays, read_states, stored_states
from jaxinfer.nn.weight import param, weight
from pallas_kernels.lib.numerics import rms_norm

_SMALLEST = 1e-6  # of a gate's size before its root


class NGrams(nn.Module):
    """The n-grams' embeddings, added to the streams before the mixer."""

    config: NGramConfig

    @nn.compact
    def __call__(
        self, stream: Stream, state: LayerArrays | None, ctx: StepContext
    ) -> tuple[Stream, LayerArrays]:
        """The streams with it added, and the new state of this part of the layer, if it has one."""
        c, total = self.config, stream.total(ctx.pins)
        assert isinstance(ctx.layer_inputs, TokenIds), "the layers have no token ids"
        arrays, rows = started(c, state, total, ctx)
        before = arrays[LAST_IDS]
        last = last_tokens(ctx.layer_inputs.ids, before, rows, ctx, c.boundary)
        ids = ngram_rows(_within(last, c.boundary, c.boundary), c.multipliers, c.sizes)
        table = weight(self, "table", by_output=True)
        found = table.take_of(ids.reshape(-1), ctx).astype(total.dtype)
        value = self._gated(found.reshape(len(ids), -1), total, ctx)  # [T, n, D]
        inputs = self._normed(value, 2).reshape(total.shape)
        mixed, kept = convolved(
            inputs, self._taps(), None, arrays[LAST_INPUTS], rows, ctx, silu=True
        )
        new: LayerArrays = {}
        if state is not None:
            new = {LAST_IDS: _stored(before, last, rows), LAST_INPUTS: kept}
        return Stream(total + (value.reshape(total.shape) + mixed)), new

    def _gated(
        self,
        embeddings: jax.Array,  # [T, P]
        total: jax.Array,  # [T, n * D]
        ctx: StepContext,
    ) -> jax.Array:  # [T, n, D]
        """The value of a token's n-grams for each stream."""
        c = self.config
        both = linear(embeddings, weight(self, "key_value"), ctx).y
        keys, value = both[:, : c.channels], both[:, c.channels :]
        keys, queries = (
            self._normed(x, row).astype(jnp.float32) for row, x in enumerate((keys, total))
        )
        gate = jnp.sum(keys * queries, axis=2) * c.width**-0.5  # float32[T, n]
        gate = jnp.sign(gate) * jnp.sqrt(jnp.maximum(jnp.abs(gate), _SMALLEST))
        return jax.nn.sigmoid(gate).astype(value.dtype)[..., None] * value[:, None]

    def _normed(self, x: jax.Array, which: int) -> jax.Array:  # [T, n, D]
        """The norm of each stream's part."""
        c, weights = self.config, param(self, "norms")[which]
        own = x.reshape(len(x), c.num_streams, c.width)
        return rms_norm(own, weights.reshape(c.num_streams, c.width), c.norm_eps)

    def _taps(self) -> jax.Array:  # [W', n * D]
        """The convolution's weights, with zeros for the tokens between its taps."""
        taps = param(self, "conv")
        wide = jnp.zeros((self.config.taps, taps.shape[1]), taps.dtype)
        return wide.at[:: len(self.config.multipliers)].set(taps)


class NGramMean(nn.Module):
    """The mean of a token's embedding and of those of its n-grams, as the stream's first one."""

    config: NGramMeanConfig

    @nn.compact
    def __call__(
        self, stream: Stream, state: LayerArrays | None, ctx: StepContext
    ) -> tuple[Stream, LayerArrays]:
        """The stream with the mean in place of the embedding, and the new state of this part of the
        layer, if it has one.
        """
        c, total = self.config, stream.total(ctx.pins)
        assert isinstance(ctx.layer_inputs, TokenIds), "the layers have no token ids"
        arrays, rows = started(c, state, total, ctx)
        before = arrays[LAST_IDS]
        last = last_tokens(ctx.layer_inputs.ids, before, rows, ctx, c.boundary)
        ids = polynomial_rows(_within(last, c.boundary, 0), c.base, c.sizes)
        table = weight(self, "table", by_output=True)
        found = table.take_of(ids.reshape(-1), ctx).astype(total.dtype)
        found = found.reshape(*ids.shape, -1)  # [T, n, P]
        projections = param(self, "projections").reshape(ids.shape[1], c.width, -1)
        more = jnp.einsum("tnp,ndp->td", found, projections, preferred_element_type=jnp.float32)
        mean = (total[:, : c.width].astype(jnp.float32) + more) / (1 + len(c.sizes))
        x = jnp.concatenate((mean.astype(total.dtype), total[:, c.width :]), axis=1)
        return Stream(x), {} if state is None else {LAST_IDS: _stored(before, last, rows)}


def last_tokens(
    ids: jax.Array,  # int32[T]
    states: jax.Array,  # int32[P, N - 1]: the newest first
    rows: Rows,
    ctx: StepContext,
    boundary: int,
) -> jax.Array:  # int32[T, N]
    """Each token and the N - 1 tokens before it; before the first one the boundary."""
    of = jnp.minimum(rows.of_token, len(rows.slots) - 1)
    begins, before = rows.begins[of], read_states(states, rows)[of]  # [T, N - 1]
    at = jnp.arange(len(ids), dtype=jnp.int32)
    found = [ids]
    for back in range(1, before.shape[1] + 1):
        position = ctx.positions - back
        earlier = jnp.clip(begins - position - 1, 0, before.shape[1] - 1)
        own = ids[jnp.maximum(at - back, 0)]
        kept = jnp.take_along_axis(before, earlier[:, None], axis=1)[:, 0]
        token = jnp.where(position >= begins, own, kept)
        found.append(jnp.where(position >= 0, token, boundary))
    return jnp.stack(found, axis=1)


def _within(
    last: jax.Array,  # int32[T, N]
    boundary: int,
    fill: int,
) -> list[jax.Array]:  # N of int32[T]
    """The tokens from each one back to the boundary; ``fill`` stands for that and all before it."""
    cut = jnp.cumsum(last[:, 1:] == boundary, axis=1) > 0
    return [last[:, 0], *jnp.unstack(jnp.where(cut, fill, last[:, 1:]), axis=1)]


def _stored(states: jax.Array, last: jax.Array, rows: Rows) -> jax.Array:  # int32[P, N - 1]
    """The states with each row's last tokens."""
    kept = last[:, :-1].astype(states.dtype)
    saved = None if rows.saves is None else kept[rows.saves.last_tokens(rows)]
    return stored_states(states, rows, kept[rows.last_tokens], saved)
