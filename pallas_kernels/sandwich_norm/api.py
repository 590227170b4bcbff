"""sandwich_norm: normalise blocks' outputs, add them to the residual stream, normalise the sum."""

from __future__ import annotations

from pallas_kernels.harness.pins import without_pins
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_partials
from pallas_kernels.sandwich_norm import cases, launch, ref, unfused
from pallas_kernels.sandwich_norm.launch import MAX_OUTPUTS
from pallas_kernels.sandwich_norm.ref import Normed, SandwichArgs

_triton = without_pins(imported_when_called("pallas_kernels.sandwich_norm.triton", "sandwich_norm"))

OP = KernelOp(
    name="sandwich_norm",
    ref=ref.sandwich_norm,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("unfused", unfused.unfused),
        Impl("xla", unfused.plain_xla),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # Up to five results are rounded one after the other, and each may differ by one step.
    tolerance={"float32": 6e-6, "bfloat16": 4e-2, "float16": 5e-3},
    feeds=((0, 0),),
)


def sandwich_norm(args: SandwichArgs) -> Normed:
    """The sum of the residual stream and of blocks' normalised outputs, and norms of the sum.

        total = (x + post(sum over i of output_norm_i(outputs[i]))) * factor

    Norms are RMS norms over D with ``eps`` under the root, those of outputs with ``output_eps``;
    each one that is None, and a factor that
    is None, changes nothing. Outputs may be split-K partials. Every norm and every sum is rounded
    to the dtype of ``x``. ``pins`` may name an implementation of this op, or of ``residual_norm``,
    which then computes each norm. Raises ValueError on arguments that do not fit together.

    Norms before and after each block are those of Sandwich-LN (Ding et al., 2021,
    arXiv:2105.13290); RMS norm: Zhang and Sennrich, 2019 (arXiv:1910.07467).
    """
    x = args.x
    if x.ndim != 2 or not 1 <= len(args.outputs) <= MAX_OUTPUTS:
        raise ValueError(f"sandwich_norm: tokens {x.shape} with {len(args.outputs)} outputs")
    if len(args.output_norms) != len(args.outputs):
        raise ValueError(
            f"sandwich_norm: {len(args.output_norms)} norms are not one for each of "
            f"{len(args.outputs)} outputs"
        )
    for output in args.outputs:
        check_partials("sandwich_norm", x, output)
    for norm in (*args.output_norms, args.post, *args.norms):
        if norm is None:
            continue
        weights = norm.weights
        if weights.ndim != 2 or weights.shape[1] != x.shape[1]:
            raise ValueError(f"sandwich_norm: tokens {x.shape} do not fit weights {weights.shape}")
        if not 0 <= norm.row < weights.shape[0]:
            raise ValueError(f"sandwich_norm: no row {norm.row} in weights {weights.shape}")
    if args.factor is not None and args.factor.shape != (1,):
        raise ValueError(f"sandwich_norm: the factor {args.factor.shape} is not one number")
    return dispatch(OP, (args,), {}, args.pins.of("sandwich_norm"))
