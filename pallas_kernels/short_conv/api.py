"""short_conv: the causal convolution of prompts over the last tokens, and the inputs it keeps."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_row_indices
from pallas_kernels.short_conv import cases, launch, ref, xla
from pallas_kernels.short_conv.ref import ShortConvArgs

_triton = imported_when_called("pallas_kernels.short_conv.triton", "short_conv")

OP = KernelOp(
    name="short_conv",
    ref=ref.short_conv,
    impls=(
        Impl("triton", _triton, ("gpu",), launch.supports, workspace=launch.workspace_bytes),
        Impl("xla", xla.short_conv, workspace=xla.workspace_bytes),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3},
    observable=cases.observable,
    donate=(2,),
    feeds=((2, 1),),
)


def short_conv(args: ShortConvArgs, impl: str | None = None) -> tuple[jax.Array, jax.Array]:
    """SiLU of the convolution [T, C] of the tokens of prompts, and the state with their inputs.

    Each channel is convolved on its own: y_t = SiLU(sum over w of ``weights[w]`` x_(t - W + 1 + w)
    + ``bias``) in float32, without ``silu`` the sum itself. Rows are packed; row r starts from
    zeros or from the inputs at ``reads[r]``, and stores the last W ones at ``writes[r]``, and
    others at ``save_rows``. No row reads what another one stores. The sum has the same order
    wherever an input comes from, so a row in parts has the bits of the whole row. In place when the
    caller donates ``kept``. ``impl`` pins an implementation. Raises ValueError on arguments that do
    not fit together.
    """
    if (
        args.x.shape[1] < args.weights.shape[1]
        or args.kept.shape[1:] != args.weights.shape
        or args.kept.dtype != args.x.dtype
        or (args.bias is not None and args.bias.shape != args.weights.shape[1:])
    ):
        raise ValueError(
            f"short_conv: inputs {args.x.dtype}{args.x.shape}, weights {args.weights.shape} and "
            f"kept inputs {args.kept.dtype}{args.kept.shape} do not fit together"
        )
    check_row_indices(OP.name, args.query_start_loc, args.begins, args.reads, args.writes)
    return dispatch(OP, (args,), {}, impl)
