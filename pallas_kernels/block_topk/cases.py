"""Named calls of block_topk on the shapes of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_topk.ref import BlockTopkArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.index_topk.cases import IndexCase, steps
from pallas_kernels.lib.shapes import Heads, paged_arrays


@dataclass(frozen=True, kw_only=True)
class BlockCase(IndexCase):
    """Rows whose last tokens choose ``top_k`` blocks, of which the last ``local`` are fixed."""

    top_k: int = 3
    block: int = 4
    local: int = 1


MINIMAX_M3: Mapping[str, Any] = MappingProxyType(
    {"heads": Heads(4, 1, 128), "block": 128, "top_k": 16}
)

CASES = (
    BlockCase(
        name="tiny_edges",
        seq_lens=(15, 16, 17, 1, 33, 0, 513),
        query_lens=(3, 16, 1, 1, 7, 0, 2),
        padding=2,
        max_pages=40,
    ),
    BlockCase(  # blocks that begin within pages
        name="tiny_odd_blocks",
        seq_lens=(40, 129),
        query_lens=(9, 1),
        block=12,
        local=2,
        dtype="bfloat16",
    ),
    BlockCase(name="tiny_fewer_than_chosen", seq_lens=(5, 3), query_lens=(5, 1), top_k=40, local=0),
    BlockCase(
        name="minimax_m3_bf16",
        seq_lens=(2500, 2049),
        query_lens=(2, 1),
        dtype="bfloat16",
        tags=("full",),
        **MINIMAX_M3,
    ),
    *(BlockCase(**step) for step in steps("minimax_m3", **MINIMAX_M3)),
)


def build(case: BlockCase, seed: int) -> Inputs:
    """Inputs of a case; the queries of padding tokens hold NaN."""
    rng = np.random.default_rng(seed)
    arrays = paged_arrays(case, len(case.seq_lens) + bool(case.padding), rng)
    shape = (len(case.lens), case.heads.num_heads, case.heads.head_dim)
    q = rng.standard_normal(shape, np.float32)
    q[case.lens == 0] = np.nan
    args: dict[str, Any] = {
        "q": q.astype(jnp.dtype(case.dtype)),
        "pages": arrays.k_pages[:, :, 0],
        "page_table": arrays.page_table,
        "rows": case.rows,
        "lens": case.lens,
        **{"block": case.block, "top_k": case.top_k, "local": case.local},
    }
    return Inputs((BlockTopkArgs(**args),))


def observable(outputs: Any) -> Any:
    """The blocks in order, since scores that are nearly equal may change places."""
    return jnp.sort(outputs, axis=-1)


def cost(case: BlockCase) -> Cost:
    """Each row's keys read once, queries read, blocks written."""
    item, (heads, width) = (
        jnp.dtype(case.dtype).itemsize,
        (case.heads.num_heads, case.heads.head_dim),
    )
    tokens, seen = len(case.lens), int(case.lens.sum())
    keys = sum(case.touched_keys(row) for row in range(len(case.seq_lens)))
    moved = (keys + tokens * heads) * width * item + 4 * tokens * heads * case.top_k
    return Cost(bytes=moved, flops=2 * seen * heads * width)
