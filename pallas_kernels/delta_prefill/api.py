"""delta_prefill: the gated delta rule over prompts, whose states are read and stored by index."""

from __future__ import annotations

import jax

from pallas_kernels.delta_prefill import cases, launch, ref, xla
from pallas_kernels.delta_prefill.ref import DeltaPrefillArgs
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_row_indices

_triton = imported_when_called("pallas_kernels.delta_prefill.triton", "delta_prefill")

OP = KernelOp(
    name="delta_prefill",
    ref=ref.delta_prefill,
    impls=(
        Impl(
            "triton",
            _triton,
            ("gpu",),
            launch.supports,
            workspace=launch.workspace_bytes,
        ),
        Impl("xla_chunks", xla.used_chunks, ("cpu",), workspace=xla.chunk_workspace_bytes),
        Impl("xla", xla.delta_prefill, workspace=xla.workspace_bytes),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 1e-4, "bfloat16": 2e-2, "float16": 3e-3},
    observable=cases.observable,
    donate=(5,),
    feeds=((5, 1),),
)


def delta_prefill(args: DeltaPrefillArgs, impl: str | None = None) -> tuple[jax.Array, jax.Array]:
    """The outputs [T, V, Dv] of the tokens of prompts, and the states with those after each row.

    A head's state S [Dk, Dv] is decayed by exp(``log_decay``), then changed by the delta rule: S +=
    k (``beta`` (v - S^T k))^T, and the output is S^T q (Yang et al. 2024, arXiv:2412.06464). A head
    has one decay, or one of each row of its state (Kimi Linear: 2025, arXiv:2510.26692). Rows are
    packed; row r starts from zeros or from the state at ``reads[r]``, and stores the state after
    its last token at ``writes[r]``, and others at ``save_rows``. No row reads what another one
    stores. In place when the caller donates the states. ``impl`` pins an implementation. Raises
    ValueError on arguments that do not fit together.
    """
    (tokens, key_heads, key_dim), (_, heads, value_dim) = args.q.shape, args.v.shape
    fits = (
        args.k.shape == args.q.shape
        and args.v.shape[0] == tokens
        and heads % key_heads == 0
        and args.beta.shape == (tokens, heads)
        and args.log_decay.shape in ((tokens, heads), (tokens, heads, key_dim))
        and args.states.shape[1:] == (heads, key_dim, value_dim)
    )
    if not fits:
        raise ValueError(
            f"delta_prefill: queries {args.q.shape}, keys {args.k.shape}, values {args.v.shape}, "
            f"decays {args.log_decay.shape}, {args.beta.shape} and states {args.states.shape} do "
            "not fit together"
        )
    check_row_indices(OP.name, args.query_start_loc, args.begins, args.reads, args.writes)
    return dispatch(OP, (args,), {}, impl)
