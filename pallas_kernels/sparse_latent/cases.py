"""Named calls of sparse_latent on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.index_topk.cases import IndexCase, steps
from pallas_kernels.index_topk.ref import NO_POSITION
from pallas_kernels.lib import shapes
from pallas_kernels.lib.page_scales import BITS
from pallas_kernels.lib.shapes import Heads, LatentHeads, latent_pools, paged_arrays
from pallas_kernels.sparse_latent.ref import SparseLatentArgs

GLM_5 = LatentHeads(64, 192, 64, 256, 512)
DEEPSEEK_V3_TP8 = LatentHeads(16, 128, 64, 128, 512)


@dataclass(frozen=True, kw_only=True)
class SparseCase(IndexCase):
    """Rows whose last tokens read ``top_k`` of their positions, in any order."""

    heads: Heads = field(init=False)  # of the pages: one head of a token's entry
    sizes: LatentHeads = shapes.TINY_LATENT
    sinks: bool = False

    def __post_init__(self) -> None:
        """Derive the heads of the pages."""
        object.__setattr__(self, "heads", Heads(self.sizes.num_heads, 1, self.sizes.entry))


CASES = (
    SparseCase(
        name="tiny_edges",
        seq_lens=(15, 17, 1, 33, 0),
        query_lens=(3, 17, 1, 7, 0),
        padding=2,
        max_pages=40,
    ),
    SparseCase(
        name="tiny_sinks", seq_lens=(15, 33, 0), query_lens=(3, 7, 0), padding=2, sinks=True
    ),
    SparseCase(
        name="tiny_splits",
        seq_lens=(400, 40, 150, 0),
        query_lens=(1, 1, 1, 0),
        padding=1,
        top_k=288,
        sinks=True,
        max_pages=40,
    ),
    SparseCase(name="tiny_fp8", seq_lens=(15, 33), query_lens=(3, 7), kv_dtype=str(BITS)),
    SparseCase(
        name="tiny_bf16", seq_lens=(40, 129), query_lens=(9, 1), page_size=64, dtype="bfloat16"
    ),
    SparseCase(
        name="v3_2_bf16",
        sizes=shapes.DEEPSEEK_V3,
        seq_lens=(2200, 40),
        query_lens=(2, 1),
        top_k=2048,
        dtype="bfloat16",
        tags=("full",),
    ),
    *(SparseCase(**step) for step in steps("v3_2", sizes=shapes.DEEPSEEK_V3, top_k=2048)),
    *(SparseCase(**step) for step in steps("v3_2_tp8", sizes=DEEPSEEK_V3_TP8, top_k=2048)),
    *(SparseCase(**step) for step in steps("glm_5", sizes=GLM_5, top_k=2048)),
)


def build(case: SparseCase, seed: int) -> Inputs:
    """Inputs of a case; the queries of padding tokens hold NaN."""
    rng = np.random.default_rng(seed)
    lens, sizes, dtype = case.lens, case.sizes, jnp.dtype(case.dtype)
    arrays = paged_arrays(case, len(case.seq_lens) + bool(case.padding), rng)
    pools, _ = latent_pools(arrays, sizes, case.dtype)
    q = rng.standard_normal((len(lens), sizes.num_heads, sizes.nope_dim + sizes.rope_dim))
    q[lens == 0] = np.nan
    positions = np.full((len(lens), case.top_k), NO_POSITION, np.int32)
    for token, length in enumerate(lens):
        chosen = rng.permutation(length)[: case.top_k]
        positions[token, : len(chosen)] = chosen
    args: dict[str, Any] = {
        "q": q.astype(dtype),
        **{
            name: (
                rng.standard_normal((sizes.num_heads * width, sizes.rank)) * sizes.rank**-0.5
            ).astype(dtype)
            for name, width in (("k_up", sizes.nope_dim), ("v_up", sizes.value_dim))
        },
        **pools,
        "page_table": arrays.page_table,
        "rows": case.rows,
        "positions": positions,
    }
    if case.sinks:
        args["sinks"] = rng.standard_normal(sizes.num_heads).astype(np.float32)
    return Inputs((SparseLatentArgs(**args, scale=sizes.scale),))


def cost(case: SparseCase) -> Cost:
    """Entries read by each token that chose them, weights and queries read, outputs written."""
    sizes, tokens, item = case.sizes, len(case.lens), jnp.dtype(case.dtype).itemsize
    read = int(np.minimum(case.lens, case.top_k).sum())
    widths = sizes.nope_dim + sizes.value_dim
    moved = read * sizes.entry + sizes.num_heads * widths * sizes.rank
    moved += tokens * sizes.num_heads * (widths + sizes.rope_dim)
    of_heads = 2 * read * (sizes.entry + sizes.rank) + 2 * tokens * widths * sizes.rank
    return Cost(bytes=moved * item, flops=sizes.num_heads * of_heads)
