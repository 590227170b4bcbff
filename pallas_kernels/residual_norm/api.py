"""residual_norm: add a GEMM's output to the residual stream and normalise the sum."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_partials
from pallas_kernels.residual_norm import cases, launch, mosaic_launch, native, ref, xla
from pallas_kernels.residual_norm.ref import NormArgs

_mosaic = imported_when_called(
    "pallas_kernels.residual_norm.mosaic", "residual_norm", mosaic_launch.result_shapes
)
_triton = imported_when_called("pallas_kernels.residual_norm.triton", "residual_norm")

OP = KernelOp(
    name="residual_norm",
    ref=ref.residual_norm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=mosaic_launch.supports),
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("native", native.residual_norm, platforms=("cpu",), supports=native.supports),
        Impl("xla", xla.residual_norm),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # The sum and the norm are rounded, and each rounding may differ by one step.
    tolerance={"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3},
    feeds=((0, 0),),
)


def residual_norm(args: NormArgs, impl: str | None = None) -> tuple[jax.Array, jax.Array]:
    """The sum of ``x`` and all partials, and that sum normalised; both [T, D] in x's dtype.

    ``partials`` is the output of a GEMM, or the split-K partials of one. The sum is computed in
    float32 and rounded once; the rounded sum is divided by its root mean square over D (``eps``
    under the root). Without partials (None) the sum is ``x``. ``weights`` holds the weights of
    several norms, of which ``row`` is used: slicing it would launch a kernel. ``impl`` pins an
    implementation. Raises ValueError on arguments that do not fit together.

    RMS norm: Zhang and Sennrich, 2019 (arXiv:1910.07467).
    """
    x, weights = args.x, args.weights
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"residual_norm: tokens {x.shape} do not fit weights {weights.shape}")
    if not 0 <= args.row < weights.shape[0]:
        raise ValueError(f"residual_norm: there is no row {args.row} in weights {weights.shape}")
    check_partials("residual_norm", x, args.partials)
    return dispatch(OP, (args,), {}, impl)
