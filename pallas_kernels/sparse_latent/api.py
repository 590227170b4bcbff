"""sparse_latent: attention of tokens over the latents of chosen positions of their rows."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.latent_pages import pools_of
from pallas_kernels.sparse_latent import cases, launch, ref, xla
from pallas_kernels.sparse_latent.ref import SparseLatentArgs

_triton = imported_when_called("pallas_kernels.sparse_latent.triton", "sparse_latent")

OP = KernelOp(
    name="sparse_latent",
    ref=ref.sparse_latent,
    impls=(
        Impl(
            "triton",
            _triton,
            platforms=("gpu",),
            supports=launch.supports,
            workspace=launch.workspace,
        ),
        Impl("xla", xla.sparse_latent, workspace=xla.workspace),
        Impl("xla_fixed", partial(xla.sparse_latent, fixed=True), workspace=xla.workspace),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3},
)


def sparse_latent(args: SparseLatentArgs, impl: str | None = None) -> jax.Array:  # [T, N, V]
    """Multi-head latent attention that reads the entries at ``positions`` alone.

    Decode rows and prompts are the same to it: each token has a row of the page table, and reads
    its positions there. Keys, values and pages are as in ``latent_prefill``, whose result this is
    for a token whose positions are all that it sees. Tokens without positions yield zeros.
    ``sinks`` are scores of each head that only add to the sums of softmaxes. ``impl`` pins an
    implementation. Raises ValueError on arguments that do not fit together.
    """
    (tokens, heads, width), k_up, v_up = args.q.shape, args.k_up, args.v_up
    rank, entry = k_up.shape[1], sum(pool.shape[-1] for pool in pools_of(args)[::2])
    nope = width - (entry - rank)
    fits = k_up.shape[0] == heads * nope and v_up.shape[1] == rank and not v_up.shape[0] % heads
    if not fits or args.pages.ndim != 3 or args.page_table.ndim != 2:
        raise ValueError(
            f"sparse_latent: queries {args.q.shape} do not fit weights {k_up.shape} and "
            f"{v_up.shape}, pages {args.pages.shape} and page_table {args.page_table.shape}"
        )
    if args.rows.shape != (tokens,) or args.positions.shape[:1] != (tokens,):
        raise ValueError(
            f"sparse_latent: rows {args.rows.shape} and positions {args.positions.shape} must have "
            f"an entry for each of {tokens} tokens"
        )
    if args.sinks is not None and args.sinks.shape != (heads,):
        raise ValueError(
            f"sparse_latent: sinks {args.sinks.shape} must have an entry for each of {heads} heads"
        )
    return dispatch(OP, (args,), {}, impl)
