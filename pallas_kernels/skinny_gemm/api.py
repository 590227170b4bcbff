"""skinny_gemm: GEMM of a few rows with a large matrix."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_bias
from pallas_kernels.lib.numerics import sum_partials
from pallas_kernels.skinny_gemm import cases, launch, native, ref, xla
from pallas_kernels.skinny_gemm.fixed import launch as fixed_launch
from pallas_kernels.skinny_gemm.ref import GemmArgs

_mosaic = imported_when_called(
    "pallas_kernels.skinny_gemm.mosaic", "skinny_gemm", launch.result_shapes
)
_triton_fixed = imported_when_called("pallas_kernels.skinny_gemm.fixed.triton", "skinny_gemm")


OP = KernelOp(
    name="skinny_gemm",
    ref=ref.skinny_gemm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.skinny_gemm),
        Impl("native", native.skinny_gemm, ("cpu",), native.supports),
        Impl("triton_fixed", _triton_fixed, ("gpu",), fixed_launch.supports),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # xla rounds gate and up to the dtype, and then each intermediate result.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
    observable=sum_partials,
)


def skinny_gemm(
    args: GemmArgs, impl: str | None = None
) -> jax.Array:  # [T, O]; with split possibly float32[S, T, O]
    """``x @ w`` in the dtype of ``x``, accumulated in float32. The kernels are for few tokens.

    With ``swiglu`` the result is SiLU of the first half of the columns times the second half
    (Shazeer, 2020, arXiv:2002.05202), and with ``gelu`` GELU of it, approximated by tanh. With
    ``split`` the result may be split-K partials, whose number depends on the device; the next
    kernel adds them up, as ``residual_norm`` does. With ``by_output`` ``w`` is [O, I], and with
    ``wide`` the result is float32. The order of summation, and with it the bits, depends on shapes
    only, with "native" and "triton_fixed" on the weights' shape alone. A ``bias`` is added to the
    sum, or to the first partial. ``impl`` pins an implementation. Raises ValueError on arguments
    that do not fit together.
    """
    check(args, "skinny_gemm")
    return dispatch(OP, (args,), {}, impl)


def check(args: GemmArgs, op: str) -> None:
    """Raise ValueError on arguments that do not fit together."""
    x, w = args.x, args.w
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1 if args.by_output else 0]:
        raise ValueError(f"{op}: tokens {x.shape} do not fit weights {w.shape}")
    if args.gelu and not args.swiglu:
        raise ValueError(f"{op}: gelu needs gates and ups, which are those of swiglu")
    if args.swiglu and args.by_output:
        raise ValueError(f"{op}: weights with swiglu are not stored by output")
    if args.swiglu and w.shape[1] % 2:
        raise ValueError(f"{op}: {w.shape[1]} columns are not a gate and an up of one width")
    if args.swiglu and args.split:
        raise ValueError(f"{op}: swiglu is not linear, so its result cannot be split")
    check_bias(op, args.bias, w.shape[0 if args.by_output else 1], alone=not args.swiglu)
