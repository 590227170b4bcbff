"""Attention within chunks of the context: a token sees those before it in its chunk (Llama 4), and
those of some chunks before that (Rnj-1: of one).

The tokens that a chunk sees are a sequence of their own: pages from the first on, and lengths that
count from there. So every kernel of causal attention computes them, without a window. A row of a
prompt whose tokens are in several chunks becomes one row for each of them.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.core.shapes import cdiv
from jaxinfer.nn.context import Pages, StepContext
from jaxinfer.nn.state import Chunk


def most_chunks(num_tokens: int, chunk: int) -> int:
    """The most chunks in which the ``num_tokens`` tokens of a step's prompts can be."""
    return cdiv(num_tokens - 1, chunk) + 1


def last_in_chunks(ctx: StepContext, chunk: Chunk, page_size: int) -> StepContext:
    """The context in which each row has the pages that its last token sees, up to that token."""
    pages, ends = ctx.pages[0], _ends(ctx)
    first = jnp.maximum((ends - 1) // chunk.size - chunk.back, 0) * chunk.size
    return replace(ctx, pages=(_from(pages, ends, first, ends - first, page_size),))


def prompts_in_chunks(ctx: StepContext, chunk: Chunk, page_size: int) -> StepContext:
    """The context with a row for each chunk of a prompt's tokens; decode rows are as they were."""
    assert ctx.rows is not None
    d, starts = ctx.num_decodes, ctx.rows.query_start_loc
    pages, begins = ctx.pages[0], ctx.rows.begins[d:, None]
    number = most_chunks(len(ctx.positions) - d, chunk.size)
    ends = _ends(ctx)[d:, None]
    own = begins // chunk.size + jnp.arange(number, dtype=jnp.int32)  # [R, C]: chunks
    last = jnp.minimum((own + 1) * chunk.size, ends)
    tokens = jnp.maximum(last - jnp.maximum(own * chunk.size, begins), 0)
    first = jnp.maximum(own - chunk.back, 0) * chunk.size
    lens = jnp.where(tokens > 0, last - first, 0).reshape(-1)
    rows = jnp.repeat(jnp.arange(d, len(pages.seq_lens), dtype=jnp.int32), number)
    own = Pages(pages.slot_mapping, pages.page_table[rows], pages.seq_lens[rows])
    own = _from(own, jnp.repeat(ends[:, 0], number), first.reshape(-1), lens, page_size)
    own = pages._replace(
        page_table=jnp.concatenate((pages.page_table[:d], own.page_table)),
        seq_lens=jnp.concatenate((pages.seq_lens[:d], own.seq_lens)),
    )
    starts = jnp.concatenate((starts[:1], starts[0] + jnp.cumsum(tokens, dtype=jnp.int32)))
    return replace(ctx, pages=(own,), rows=ctx.rows._replace(query_start_loc=starts))


def _ends(ctx: StepContext) -> jax.Array:  # int32[B]
    """The number of tokens of each row's context, those that have left its pages included."""
    assert ctx.rows is not None
    starts = ctx.rows.query_start_loc
    ones = jnp.ones(ctx.num_decodes, jnp.int32)
    return ctx.rows.begins + jnp.concatenate((ones, starts[1:] - starts[:-1]))


def _from(
    pages: Pages,
    ends: jax.Array,  # int32[B]
    first: jax.Array,  # int32[B]: a multiple of the page size
    lens: jax.Array,  # int32[B]
    page_size: int,
) -> Pages:
    """The pages from token ``first`` of the context on, with these lengths; padding has none.

    The table may already lack pages of earlier tokens, of which it has a whole number.
    """
    skipped = jnp.maximum(first - (ends - pages.seq_lens), 0) // page_size
    width = pages.page_table.shape[1]
    columns = jnp.minimum(skipped[:, None] + jnp.arange(width, dtype=jnp.int32), width - 1)
    table = jnp.take_along_axis(pages.page_table, columns, axis=1)
    return pages._replace(page_table=table, seq_lens=jnp.where(pages.seq_lens > 0, lens, 0))
