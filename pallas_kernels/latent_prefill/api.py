"""latent_prefill: causal attention of ragged chunks of queries over the latents of their rows."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.latent_prefill import cases, launch, ref, xla
from pallas_kernels.latent_prefill.ref import LatentPrefillArgs
from pallas_kernels.lib.latent_pages import check_pools

_split = imported_when_called("pallas_kernels.latent_prefill.split.triton", "latent_prefill")
_triton = imported_when_called("pallas_kernels.latent_prefill.triton", "latent_prefill")

OP = KernelOp(
    name="latent_prefill",
    ref=ref.latent_prefill,
    impls=(
        Impl(
            "split",
            _split,
            platforms=("gpu",),
            supports=launch.split_supports,
            workspace=launch.split_workspace,
        ),
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.latent_prefill),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # keys and values are rounded to the dtype after they are expanded
    tolerance={"float32": 4e-6, "bfloat16": 2e-2, "float16": 3e-3},
)


def latent_prefill(args: LatentPrefillArgs, impl: str | None = None) -> jax.Array:  # [T, N, V]
    """Multi-head latent attention of prompts (DeepSeek-V2, 2024, arXiv:2405.04434).

    Row r's queries are ``q[query_start_loc[r] : query_start_loc[r + 1]]``; they are the last tokens
    of a context of ``seq_lens[r]`` tokens, whose entries are in the pages: a token's latent (C) and
    its rotated key (R). ``entries`` repeats those of the queries' own tokens. Head n's key of a
    token is ``k_up[n * D : (n + 1) * D] @ latent``, followed by the rotated key, which all heads
    share; its value is ``v_up[n * V : (n + 1) * V] @ latent``. Rows may be empty; queries past
    ``query_start_loc[R]`` are padding and yield zeros. Pages, NaN and dtypes are as in
    ``append_decode``, 8-bit pages as in ``lib.latent_pages``. ``impl`` pins an implementation.
    Raises ValueError on arguments that do not fit together.
    """
    (tokens, heads, width), k_up, v_up = args.q.shape, args.k_up, args.v_up
    check_pools("latent_prefill", args, args.entries, args.page_table, args.seq_lens)
    rank = k_up.shape[1]
    nope = width - (args.entries.shape[1] - rank)
    fits = k_up.shape[0] == heads * nope and v_up.shape[1] == rank and not v_up.shape[0] % heads
    if not fits or args.entries.shape[0] != tokens:
        raise ValueError(
            f"latent_prefill: queries {args.q.shape} do not fit weights {k_up.shape} and "
            f"{v_up.shape}, entries {args.entries.shape} and pages {args.pages.shape}"
        )
    if args.query_start_loc.shape != (args.seq_lens.shape[0] + 1,):
        raise ValueError(
            f"latent_prefill: query_start_loc {args.query_start_loc.shape} must hold one entry "
            f"more than the {args.seq_lens.shape[0]} rows"
        )
    return dispatch(OP, (args,), {}, impl)
