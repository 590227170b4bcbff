"""index_topk: the tokens of each token's context that its sparse attention reads."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.index_topk import cases, launch, ref, xla
from pallas_kernels.index_topk.ref import IndexTopkArgs

_triton = imported_when_called("pallas_kernels.index_topk.triton", "index_topk")

OP = KernelOp(
    name="index_topk",
    ref=ref.index_topk,
    impls=(
        Impl(
            "triton",
            _triton,
            platforms=("gpu",),
            supports=launch.supports,
            workspace=launch.workspace,
        ),
        Impl("xla", xla.index_topk, workspace=xla.workspace),
        Impl("xla_fixed", partial(xla.index_topk, fixed=True), workspace=xla.workspace),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"int32": 0.0},
    observable=cases.observable,
)


def index_topk(args: IndexTopkArgs, impl: str | None = None) -> jax.Array:  # int32[T, K]
    """The positions with the ``top_k`` largest scores among the ``lens[t]`` first of a token's row.

    DeepSeek's lightning indexer (DeepSeek-V3.2, 2025, arXiv:2512.02556): the score of a position is
    the sum over heads of ``weights[t, h] * relu(q[t, h] . key)``, in float32. K is ``top_k``, or
    less if a row of the page table has fewer positions. Of equal scores the first positions are
    chosen. A token that sees fewer than K has -1 behind its positions. Their order is that of
    scores or of positions, as is quicker. Pages and NaN are as in
    ``append_decode``; the tokens' own keys are in the pages. ``impl`` pins an implementation.
    Raises ValueError on arguments that do not fit together.
    """
    (tokens, heads, width), pages = args.q.shape, args.pages
    fits = args.weights.shape == (tokens, heads) and pages.ndim == 3 and pages.shape[2] == width
    if not fits or args.page_table.ndim != 2:
        raise ValueError(
            f"index_topk: queries {args.q.shape} do not fit weights {args.weights.shape}, pages "
            f"{pages.shape} and page_table {args.page_table.shape}"
        )
    if args.rows.shape != (tokens,) or args.lens.shape != (tokens,) or args.top_k < 1:
        raise ValueError(
            f"index_topk: rows {args.rows.shape} and lens {args.lens.shape} must have an entry for "
            f"each of {tokens} tokens, and top_k {args.top_k} must be positive"
        )
    return dispatch(OP, (args,), {}, impl)
