"""block_topk: the blocks of each token's context that the heads of its sparse attention read."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.block_topk import cases, ref, xla
from pallas_kernels.block_topk.ref import BlockTopkArgs
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch

OP = KernelOp(
    name="block_topk",
    ref=ref.block_topk,
    impls=(
        Impl("xla", xla.block_topk, workspace=xla.workspace),
        Impl("xla_fixed", partial(xla.block_topk, fixed=True), workspace=xla.workspace),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"int32": 0.0},
    observable=cases.observable,
)


def block_topk(args: BlockTopkArgs, impl: str | None = None) -> jax.Array:  # int32[T, H, K]
    """The ``top_k`` blocks with the largest scores among those of the ``lens[t]`` first positions
    of a token's row, for each head.

    MiniMax-M3's indexer (``modeling_minimax_m3_vl`` of Hugging Face transformers): the score of a
    block of ``block`` positions is the largest ``q[t, h] . key`` of those that the token sees, in
    float32; the last ``local`` blocks come before all others. K is ``top_k``, or less if a row of
    the page table has fewer blocks. A token that sees fewer than K has -1 behind its blocks, whose
    order is that of their scores. Pages and NaN are as in ``append_decode``; the tokens' own keys
    are in the pages. ``impl`` pins an implementation. Raises ValueError on arguments that do not
    fit together.
    """
    (tokens, _, width), pages = args.q.shape, args.pages
    if pages.ndim != 3 or pages.shape[2] != width or args.page_table.ndim != 2:
        raise ValueError(
            f"block_topk: queries {args.q.shape} do not fit pages {pages.shape} and page_table "
            f"{args.page_table.shape}"
        )
    if args.rows.shape != (tokens,) or args.lens.shape != (tokens,):
        raise ValueError(
            f"block_topk: rows {args.rows.shape} and lens {args.lens.shape} must have an entry for "
            f"each of {tokens} tokens"
        )
    if args.block < 1 or not 0 <= args.local <= args.top_k or args.top_k < 1:
        raise ValueError(
            f"block_topk: block {args.block} and top_k {args.top_k} must be positive, and local "
            f"{args.local} between 0 and top_k"
        )
    return dispatch(OP, (args,), {}, impl)
