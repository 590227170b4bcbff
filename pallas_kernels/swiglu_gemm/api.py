"""swiglu_gemm: tokens times gate and up weights, and SwiGLU of the results."""

from __future__ import annotations

import jax

from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.skinny_gemm import launch as skinny_launch
from pallas_kernels.skinny_gemm import native, ref, xla
from pallas_kernels.skinny_gemm.api import check
from pallas_kernels.skinny_gemm.fixed import launch as fixed_launch
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.swiglu_gemm import cases, launch

_mosaic = imported_when_called(
    "pallas_kernels.swiglu_gemm.mosaic", "swiglu_gemm", launch.result_shapes
)
_skinny_mosaic = imported_when_called(
    "pallas_kernels.skinny_gemm.mosaic", "skinny_gemm", skinny_launch.result_shapes
)
_triton_fixed = imported_when_called("pallas_kernels.skinny_gemm.fixed.triton", "skinny_gemm")

OP = KernelOp(
    name="swiglu_gemm",
    ref=ref.skinny_gemm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=launch.supports),
        Impl("skinny_gemm", _skinny_mosaic, ("gpu",), supports=skinny_launch.supports),
        Impl("xla", xla.skinny_gemm),
        Impl("native", native.skinny_gemm, ("cpu",), native.supports),
        Impl("triton_fixed", _triton_fixed, ("gpu",), fixed_launch.supports),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # xla rounds gate and up to the dtype, and then each intermediate result.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
)


def swiglu_gemm(args: GemmArgs, impl: str | None = None) -> jax.Array:  # [T, O]
    """SiLU of ``x`` times the first half of the columns, times ``x`` times the second half.

    With ``gelu`` it is GELU, approximated by tanh, instead of SiLU. In the dtype of ``x``,
    accumulated in float32. The order of summation, and with it the bits, depends on shapes only.
    ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.

    SwiGLU: Shazeer, 2020 (arXiv:2002.05202).
    """
    if not args.swiglu:
        raise ValueError("swiglu_gemm: the arguments are those of a GEMM without swiglu")
    check(args, "swiglu_gemm")
    return dispatch(OP, (args,), {}, impl)
