"""paged_decode: attention of one query per row over the row's pages.

Steps run it within ``append_decode``, which has the kernels for GPUs.
"""

from __future__ import annotations

import jax

from pallas_kernels.checks import check_paged
from pallas_kernels.paged_decode import cases, ref, xla
from pallas_kernels.registry import Impl, KernelOp, dispatch

OP = KernelOp(
    name="paged_decode",
    ref=ref.paged_decode,
    impls=(Impl("xla", xla.paged_decode),),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3},
    feeds=((0, 0),),
)


def paged_decode(
    q: jax.Array,  # [B, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[B, M]
    seq_lens: jax.Array,  # int32[B]
    *,
    scale: float,
    window: int | None = None,
    impl: str | None = None,
) -> jax.Array:  # [B, N, H]
    """Each row's query attends to the last ``window`` (None: all) of its ``seq_lens[b]`` tokens.

    The query is the context's last token, whose K and V are already in the pages. Token p of row b
    lies in page ``page_table[b, p // S]`` at offset p % S; entries past the row's pages may be
    junk, and slots past its length may hold anything, NaN included. A row of length 0 is padding
    and yields zeros. N is a multiple of K; query head n reads kv head n // (N // K). Sums are in
    float32; the result has q's dtype, and the pages that or a narrower one. A row's bits depend
    neither on what the other rows hold nor on how many there are. ``impl`` pins an implementation.
    Raises ValueError on arguments that do not fit together.

    The online softmax is that of FlashAttention-2 (Dao, 2023, arXiv:2307.08691), paging that of
    PagedAttention (Kwon et al., 2023, arXiv:2309.06180).
    """
    check_paged("paged_decode", q, k_pages, v_pages, page_table, seq_lens, window)
    if q.shape[0] != seq_lens.shape[0]:
        raise ValueError(f"paged_decode: {q.shape[0]} queries for {seq_lens.shape[0]} rows")
    args = (q, k_pages, v_pages, page_table, seq_lens)
    return dispatch(OP, args, {"scale": scale, "window": window}, impl)
