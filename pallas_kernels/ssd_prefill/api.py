"""ssd_prefill: Mamba-2's state space over prompts, whose states are read and stored by index."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_row_indices
from pallas_kernels.ssd_prefill import cases, launch, ref, xla
from pallas_kernels.ssd_prefill.ref import SsdPrefillArgs

_triton = imported_when_called("pallas_kernels.ssd_prefill.triton", "ssd_prefill")

OP = KernelOp(
    name="ssd_prefill",
    ref=ref.ssd_prefill,
    impls=(
        Impl("triton", _triton, ("gpu",), launch.supports, workspace=launch.workspace_bytes),
        Impl("xla", xla.ssd_prefill, workspace=xla.workspace_bytes),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3},
    observable=cases.observable,
    donate=(3,),
    feeds=((3, 1),),
)


def ssd_prefill(args: SsdPrefillArgs, impl: str | None = None) -> tuple[jax.Array, jax.Array]:
    """The outputs [T, H, P] of the tokens of prompts, and the states with those after each row.

    With the step d = softplus(``steps`` + bias), within ``limits``, and the rate a, a token changes
    a head's state S [P, N] to exp(-a d) S + d x b^T, and the output is S c + D x (Dao and Gu 2024,
    arXiv:2405.21060). Rows are packed; row r starts from zeros or from the state at ``reads[r]``,
    and stores the state after its last token at ``writes[r]``, and others at ``save_rows``. No row
    reads what another one stores. In place when the caller donates the states. ``impl`` pins an
    implementation. Raises ValueError on arguments that do not fit together.
    """
    unfit = ref.unfit_shapes(args.mixed, args.steps, args.decay, args.states)
    if unfit is not None:
        raise ValueError(f"ssd_prefill: {unfit} do not fit together")
    check_row_indices(OP.name, args.query_start_loc, args.begins, args.reads, args.writes)
    return dispatch(OP, (args,), {}, impl)
