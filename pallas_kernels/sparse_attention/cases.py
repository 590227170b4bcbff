"""Named calls of sparse_attention on the shapes of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_topk.cases import BlockCase
from pallas_kernels.block_topk.ref import NO_BLOCK
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.index_topk.cases import steps
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import Heads, paged_arrays
from pallas_kernels.sparse_attention.ref import SparseAttentionArgs


@dataclass(frozen=True, kw_only=True)
class SparseAttentionCase(BlockCase):
    """Rows whose last tokens read ``top_k`` blocks for each KV head, in any order."""

    heads: Heads = Heads(6, 2, 16)


MINIMAX_M3: Mapping[str, Any] = MappingProxyType(
    {"heads": Heads(64, 4, 128), "block": 128, "top_k": 16}
)

CASES = (
    SparseAttentionCase(
        name="tiny_edges",
        seq_lens=(15, 17, 1, 33, 0),
        query_lens=(3, 17, 1, 7, 0),
        padding=2,
        max_pages=40,
    ),
    SparseAttentionCase(name="tiny_fp8", seq_lens=(15, 33), query_lens=(3, 7), kv_dtype=str(BITS)),
    SparseAttentionCase(  # blocks that begin within pages
        name="tiny_odd_blocks",
        seq_lens=(40, 129),
        query_lens=(9, 1),
        block=12,
        dtype="bfloat16",
    ),
    SparseAttentionCase(
        name="minimax_m3_bf16",
        seq_lens=(2500, 40),
        query_lens=(2, 1),
        dtype="bfloat16",
        tags=("full",),
        **MINIMAX_M3,
    ),
    *(SparseAttentionCase(**step) for step in steps("minimax_m3", **MINIMAX_M3)),
)


def build(case: SparseAttentionCase, seed: int) -> Inputs:
    """Inputs of a case; the queries of padding tokens hold NaN."""
    rng = np.random.default_rng(seed)
    lens, heads = case.lens, case.heads
    arrays = paged_arrays(case, len(case.seq_lens) + bool(case.padding), rng)
    q = rng.standard_normal((len(lens), heads.num_heads, heads.head_dim), np.float32)
    q[lens == 0] = np.nan
    blocks = np.full((len(lens), heads.num_kv_heads, case.top_k), NO_BLOCK, np.int32)
    for token, length in enumerate(lens):
        for own in blocks[token]:
            chosen = rng.permutation(-(-length // case.block))[: case.top_k]
            own[: len(chosen)] = chosen
    args: dict[str, Any] = {
        "q": q.astype(jnp.dtype(case.dtype)),
        "k_pages": arrays.k_pages,
        "v_pages": arrays.v_pages,
        "k_scales": arrays.k_scales,
        "v_scales": arrays.v_scales,
        "page_table": arrays.page_table,
        "rows": case.rows,
        "lens": lens,
        "blocks": blocks,
    }
    scale = heads.head_dim**-0.5
    return Inputs((SparseAttentionArgs(**args, block=case.block, scale=scale),))


def cost(case: SparseAttentionCase) -> Cost:
    """Keys and values read by each token that chose them, queries read, outputs written."""
    heads, tokens, item = case.heads, len(case.lens), jnp.dtype(case.dtype).itemsize
    read = int(np.minimum(case.lens, case.top_k * case.block).sum())
    moved = (2 * read * heads.num_kv_heads + 2 * tokens * heads.num_heads) * heads.head_dim
    return Cost(bytes=moved * item, flops=4 * read * heads.num_heads * heads.head_dim)
