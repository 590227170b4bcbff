"""Bounds on the memory of attention to chosen blocks with pooled keys, and of n-gram embeddings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.block import StepShape
from jaxinfer.nn.mixers.bounds import MOST_PAGES, conv_bytes
from jaxinfer.nn.mixers.pooled_attention_spec import PooledAttentionConfig
from jaxinfer.nn.ngram_spec import NGramConfig
from pallas_kernels.harness.registry import KernelOp, workspace_of
from pallas_kernels.index_topk import api as index_topk
from pallas_kernels.index_topk.ref import IndexTopkArgs
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.sparse_attention import api as sparse_attention
from pallas_kernels.sparse_attention.ref import SparseAttentionArgs


def pooled_attention_bytes(config: PooledAttentionConfig, step: StepShape) -> int:
    """The bytes that the choice and attention to it allocate, for any length of context; the
    queries and blocks of all tokens; and the keys of blocks, as they are gathered and averaged.
    """
    of: Any = jax.ShapeDtypeStruct
    c, index, (tokens, dtype) = config, config.indexer, (step.x.shape[0], step.x.dtype)
    rows, table = of((tokens,), jnp.int32), of((tokens, MOST_PAGES), jnp.int32)
    among = IndexTopkArgs(
        q=of((tokens, index.num_heads, index.head_dim), dtype),
        weights=of((tokens, index.num_heads), jnp.float32),
        pages=of((1, 16, index.head_dim), dtype),
        page_table=table,
        rows=rows,
        lens=rows,
        top_k=index.top_k,
    )
    pool = of((1, 16, c.num_kv_heads, c.head_dim), c.page_dtype or dtype)
    scales = of(pool.shape[:3], jnp.float32) if c.page_dtype == BITS else None
    sparse = SparseAttentionArgs(
        q=of((tokens, c.num_heads, c.head_dim), dtype),
        k_pages=pool,
        v_pages=pool,
        k_scales=scales,
        v_scales=scales,
        page_table=table,
        rows=rows,
        lens=rows,
        blocks=of((tokens, c.num_kv_heads, index.top_k + 1), jnp.int32),
        block=index.block,
        scale=c.scale,
    )
    ops: list[tuple[KernelOp, Any]] = [(index_topk.OP, among), (sparse_attention.OP, sparse)]
    found = (workspace_of(op, step.platform, args, step.pins.of(op.name)) for op, args in ops)
    heads = (c.num_heads * c.head_dim + index.num_heads * index.head_dim) * dtype.itemsize
    chosen = 4 * (c.num_kv_heads + 1) * (index.top_k + 1)
    blocks = tokens // index.block + 2 * step.num_prompts
    means = 4 * index.head_dim * (5 * (tokens + index.block * blocks) + 9 * blocks)
    return max(found) + tokens * (heads + chosen) + means


def ngram_bytes(config: NGramConfig, step: StepShape) -> int:
    """In float32 a token's keys and streams and their products, the value for each stream, and its
    convolution.
    """
    streams = 4 * step.x.shape[0] * config.channels
    embeddings = 2 * 4 * step.x.shape[0] * (config.embed_dim + len(config.sizes))
    return 6 * streams + embeddings + conv_bytes(step, config.channels, config.taps, bias=False)
