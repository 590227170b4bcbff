"""Named calls of index_topk on the shapes of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.index_topk.ref import IndexTopkArgs
from pallas_kernels.lib.shapes import Heads, PagedCase, paged_arrays


@dataclass(frozen=True, kw_only=True)
class IndexCase(PagedCase):
    """Rows whose last ``query_lens`` tokens choose; of padding tokens each sees nothing."""

    heads: Heads = Heads(3, 1, 16)  # of queries; a position has one key
    top_k: int = 8
    whole: bool = False  # all values are -1 or 1, so that many scores are equal

    @property
    def lens(self) -> np.ndarray:  # int32[T]
        """The positions that each token sees."""
        pairs = zip(self.seq_lens, self.query_lens, strict=True)
        own = [np.arange(seq - queries + 1, seq + 1) for seq, queries in pairs]
        return np.concatenate((*own, np.zeros(self.padding))).astype(np.int32)

    @property
    def rows(self) -> np.ndarray:  # int32[T]
        """The row of each token; those of padding are clamped."""
        own = np.repeat(np.arange(len(self.seq_lens)), self.query_lens)
        return np.concatenate((own, np.full(self.padding, len(self.seq_lens)))).astype(np.int32)


DEEPSEEK_V32 = DEEPSEEK_V4 = Heads(64, 1, 128)  # of V4 a position is a compressed entry
GLM_5 = Heads(32, 1, 128)


def steps(model: str, **sizes: Any) -> tuple[dict[str, Any], ...]:
    """Decode steps on a GPU, and the end of a prompt, for cases of sparse attention."""
    common = {"max_pages": 2048, "dtype": "bfloat16", "tags": ("bench", "gpu"), **sizes}
    decodes = tuple(
        {
            "name": f"{model}_step_b{rows}_ctx{context}",
            "seq_lens": (context,) * rows,
            "query_lens": (1,) * rows,
            **common,
        }
        for rows, context in ((1, 4128), (1, 16416), (8, 16416), (64, 4128))
    )
    prompt = {"name": f"{model}_t512_ctx8192", "seq_lens": (8192,), "query_lens": (512,)}
    return (*decodes, {**prompt, **common})


CASES = (
    IndexCase(
        name="tiny_edges",
        seq_lens=(15, 16, 17, 1, 33, 0, 513),
        query_lens=(3, 16, 1, 1, 7, 0, 2),
        padding=2,
        max_pages=40,
    ),
    IndexCase(  # a long context, from whose parts the Triton kernel chooses first
        name="tiny_equal_scores",
        seq_lens=(33000, 9000, 129),
        query_lens=(1, 1, 1),
        top_k=2048,
        max_pages=2100,
        whole=True,
    ),
    IndexCase(
        name="tiny_fewer_than_chosen", seq_lens=(5, 3), query_lens=(5, 1), top_k=40, max_pages=2
    ),
    IndexCase(
        name="tiny_bf16", seq_lens=(40, 129), query_lens=(9, 1), page_size=64, dtype="bfloat16"
    ),
    IndexCase(
        name="v3_2_bf16",
        heads=DEEPSEEK_V32,
        seq_lens=(2200, 2049),
        query_lens=(2, 1),
        top_k=2048,
        dtype="bfloat16",
        tags=("full",),
    ),
    IndexCase(  # compressed entries of a context of 2,400 tokens
        name="v4_bf16",
        heads=DEEPSEEK_V4,
        seq_lens=(600, 513),
        query_lens=(2, 1),
        top_k=512,
        dtype="bfloat16",
        tags=("full",),
    ),
    *(IndexCase(**step) for step in steps("v3_2", heads=DEEPSEEK_V32, top_k=2048)),
    *(IndexCase(**step) for step in steps("glm_5", heads=GLM_5, top_k=2048)),
    *(IndexCase(**step) for step in steps("v4", heads=DEEPSEEK_V4, top_k=512)),
)


def build(case: IndexCase, seed: int) -> Inputs:
    """Inputs of a case; the queries of padding tokens hold NaN."""
    rng = np.random.default_rng(seed)
    lens, dtype = case.lens, jnp.dtype(case.dtype)
    arrays = paged_arrays(case, len(case.seq_lens) + bool(case.padding), rng)
    q = rng.standard_normal((len(lens), case.heads.num_heads, case.heads.head_dim), np.float32)
    weights = rng.standard_normal(q.shape[:2], np.float32)
    keys = arrays.k_pages[:, :, 0]
    if case.whole:
        q, weights, keys = np.sign(q), np.sign(weights), np.sign(keys)
    q[lens == 0] = weights[lens == 0] = np.nan
    args: dict[str, Any] = {
        "q": q.astype(dtype),
        "weights": weights,
        "pages": keys,
        "page_table": arrays.page_table,
        "rows": case.rows,
        "lens": lens,
    }
    return Inputs((IndexTopkArgs(**args, top_k=case.top_k),))


def observable(outputs: Any) -> Any:
    """The positions in order, since implementations list them in different orders."""
    return jnp.sort(outputs, axis=1)


def cost(case: IndexCase) -> Cost:
    """Each row's keys read once, queries read, positions written."""
    item, (heads, width) = (
        jnp.dtype(case.dtype).itemsize,
        (case.heads.num_heads, case.heads.head_dim),
    )
    tokens, seen = len(case.lens), int(case.lens.sum())
    keys = sum(case.touched_keys(row) for row in range(len(case.seq_lens)))
    moved = (keys + tokens * heads) * width * item + 4 * tokens * (heads + case.top_k)
    return Cost(bytes=moved, flops=2 * seen * heads * (width + 1))
