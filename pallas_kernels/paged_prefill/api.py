"""paged_prefill: causal attention of ragged chunks of queries over the pages of their rows."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_paged
from pallas_kernels.lib.page_scales import check_scales
from pallas_kernels.native import attention
from pallas_kernels.paged_prefill import cases, launch, ref, xla
from pallas_kernels.paged_prefill.converted import launch as converted_launch
from pallas_kernels.paged_prefill.fixed import launch as fixed_launch
from pallas_kernels.paged_prefill.ref import PrefillArgs

_mosaic = imported_when_called(
    "pallas_kernels.paged_prefill.mosaic", "paged_prefill", launch.result_shapes
)
_converted = imported_when_called("pallas_kernels.paged_prefill.converted.triton", "paged_prefill")
_split = imported_when_called("pallas_kernels.paged_prefill.split.triton", "paged_prefill")
_triton = imported_when_called("pallas_kernels.paged_prefill.triton", "paged_prefill")
_triton_fixed = imported_when_called("pallas_kernels.paged_prefill.fixed.triton", "paged_prefill")


OP = KernelOp(
    name="paged_prefill",
    ref=ref.paged_prefill,
    impls=(
        Impl(
            "split",
            _split,
            platforms=("gpu",),
            supports=launch.split_supports,
            workspace=launch.split_workspace,
        ),
        Impl(
            "mosaic",
            _mosaic,
            platforms=("gpu",),
            supports=launch.mosaic_supports,
        ),
        Impl(
            "converted",
            _converted,
            platforms=("gpu",),
            supports=converted_launch.supports,
            workspace=converted_launch.workspace,
        ),
        Impl(
            "triton",
            _triton,
            platforms=("gpu",),
            supports=launch.triton_supports,
        ),
        Impl(
            "native",
            attention.paged_prefill,
            platforms=("cpu",),
            supports=attention.prefill_supports,
        ),
        Impl("xla", xla.paged_prefill),
        Impl("triton_fixed", _triton_fixed, ("gpu",), fixed_launch.supports),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3},
    feeds=((0, 0),),
)


def paged_prefill(args: PrefillArgs, impl: str | None = None) -> jax.Array:  # [T, N, H]
    """Each row's queries attend causally to the last ``window`` tokens of context (None: all).

    Row r's queries are ``q[query_start_loc[r] : query_start_loc[r + 1]]``; they are the last
    tokens of a context of ``seq_lens[r]`` tokens whose K and V, this chunk's included, are already
    in the pages. A query at position p sees keys p - window + 1 to p. Rows may be empty; queries
    past ``query_start_loc[R]`` are padding and yield zeros. Pages, heads, NaN, dtypes and sinks are
    as in ``append_decode.attend_ref``. ``impl`` pins an implementation. Raises ValueError on
    arguments that do not fit together.

    The online softmax is that of FlashAttention-2 (Dao, 2023, arXiv:2307.08691).
    """
    context = args.page_table, args.seq_lens, args.window, args.sinks, args.slopes
    context = (*context, args.sink_values)
    check_paged("paged_prefill", args.q, args.k_pages, args.v_pages, *context)
    if args.query_start_loc.shape != (args.seq_lens.shape[0] + 1,):
        raise ValueError(
            f"paged_prefill: query_start_loc {args.query_start_loc.shape} must hold one entry more "
            f"than the {args.seq_lens.shape[0]} rows"
        )
    check_scales("paged_prefill", args)
    return dispatch(OP, (args,), {}, impl)
