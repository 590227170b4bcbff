"""sparse_attention: grouped-query attention of tokens over chosen blocks of their rows."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch
from pallas_kernels.lib.page_scales import check_scales
from pallas_kernels.sparse_attention import cases, ref, xla
from pallas_kernels.sparse_attention.ref import SparseAttentionArgs

OP = KernelOp(
    name="sparse_attention",
    ref=ref.sparse_attention,
    impls=(
        Impl("xla", xla.sparse_attention, workspace=xla.workspace),
        Impl("xla_fixed", partial(xla.sparse_attention, fixed=True), workspace=xla.workspace),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3},
)


def sparse_attention(args: SparseAttentionArgs, impl: str | None = None) -> jax.Array:  # [T, N, H]
    """Attention that reads the keys and values of ``blocks`` alone, and there those a token sees.

    Decode rows and prompts are the same to it: each token has a row of the page table, and the
    queries of each KV head have blocks of ``block`` positions of their own. Pages are as in
    ``paged_prefill``, whose result this is for a token whose blocks are all that it sees. Tokens
    without blocks yield zeros. ``impl`` pins an implementation. Raises ValueError on arguments that
    do not fit together.
    """
    (tokens, heads, width), pages = args.q.shape, args.k_pages
    fits = pages.ndim == 4 and pages.shape[3] == width and pages.shape == args.v_pages.shape
    if not fits or heads % pages.shape[2] or args.page_table.ndim != 2:
        raise ValueError(
            f"sparse_attention: queries {args.q.shape} do not fit pages {pages.shape} and "
            f"{args.v_pages.shape}, and page_table {args.page_table.shape}"
        )
    check_scales("sparse_attention", args)
    of_token = args.rows.shape == args.lens.shape == (tokens,)
    if not of_token or args.blocks.shape[:-1] != (tokens, pages.shape[2]):
        raise ValueError(
            f"sparse_attention: rows {args.rows.shape} and lens {args.lens.shape} must have an "
            f"entry for each of {tokens} tokens, and blocks {args.blocks.shape} also for each of "
            f"{pages.shape[2]} KV heads"
        )
    return dispatch(OP, (args,), {}, impl)
