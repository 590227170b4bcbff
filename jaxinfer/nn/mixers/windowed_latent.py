"""Latent attention within a window; the parameters are those of ``mixers.latent``.

In a step decode rows and prompts are the same: each token attends to the positions of its window,
as to those that an indexer chooses (``mixers.indexed_latent``).
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.nn.context import PlainOutput, StepContext
from jaxinfer.nn.linear import Norm, Stream
from jaxinfer.nn.mixers.latent import (
    Expansion,
    Tokens,
    attend,
    dense,
    output,
    pools_of,
    projected,
    with_entries,
)
from jaxinfer.nn.mixers.windowed_latent_spec import WindowedLatentConfig
from jaxinfer.nn.state import LayerArrays
from jaxinfer.nn.weight import param
from pallas_kernels.index_topk.ref import NO_POSITION
from pallas_kernels.sparse_latent.api import SparseLatentArgs, sparse_latent


class WindowedLatentAttention(nn.Module):
    """The attention block of a layer, with the norm before it."""

    config: WindowedLatentConfig

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
        c = self.config
        made = projected(self, c, stream, norm, ctx)
        kv_b, tokens = Expansion(**param(self, "kv_b")), made.tokens
        if ctx.rows is None:
            distance = jnp.arange(len(tokens.q))[:, None] - jnp.arange(len(tokens.q))
            seen = (distance >= 0) & (distance < c.window)
            out = dense(tokens, kv_b, ctx, c, only, seen)
        elif c.selects:
            out, state = self._paged(tokens, kv_b, state, ctx, only)
        else:
            out, state = attend(tokens, kv_b, state, ctx, c, only)
        return *output(self, c, made, out, ctx, only), state

    def _paged(
        self,
        tokens: Tokens,
        kv_b: Expansion,
        state: LayerArrays | None,
        ctx: StepContext,
        only: jax.Array | None,  # int32[B]
    ) -> tuple[jax.Array, LayerArrays]:  # [T, N, V], or with only [B, N, V]
        """Append this step's entries to the pages, and attend to those of the window."""
        rows, pages, own = ctx.rows, ctx.pages[0], slice(None) if only is None else only
        assert rows is not None and state is not None
        state = with_entries(state, tokens.entries, pages.slot_mapping)
        lens = ctx.token_rows().pages[0].seq_lens  # int32[T]: from the first page that is held
        at = lens[:, None] - 1 - jnp.arange(self.config.window)  # [T, W]
        at = jnp.where(at >= 0, at, NO_POSITION)
        args = SparseLatentArgs(
            q=tokens.q[own],
            k_up=kv_b.k,
            v_up=kv_b.v,
            **pools_of(state),
            page_table=pages.page_table,
            rows=rows.of_token[own],
            positions=at[own],
            scale=self.config.scale,
        )
        return sparse_latent(args, ctx.pinned("sparse_latent")), state
