"""quantised_gemm: tokens times the transpose of a quantised weight matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax

from pallas_kernels.harness.registry import (
    Impl,
    KernelOp,
    current_platform,
    dispatch,
    imported_when_called,
    select,
)
from pallas_kernels.lib.arrangements import of_either_order
from pallas_kernels.lib.checks import check_bias
from pallas_kernels.lib.numerics import sum_partials
from pallas_kernels.quantised_gemm import cases, native, ref, xla
from pallas_kernels.quantised_gemm.fp8 import launch as fp8_launch
from pallas_kernels.quantised_gemm.fp8 import tokens as fp8_tokens
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled import launch
from pallas_kernels.quantised_gemm.tiled.large import launch as large_launch

_tiled = imported_when_called(
    "pallas_kernels.quantised_gemm.tiled.mosaic", "quantised_gemm", launch.result_shapes
)
_large = imported_when_called(
    "pallas_kernels.quantised_gemm.tiled.large.mosaic", "quantised_gemm", large_launch.result_shapes
)
_fp8_mosaic = imported_when_called(
    "pallas_kernels.quantised_gemm.fp8.mosaic", "quantised_gemm", fp8_launch.result_shapes
)


def _then_bias(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A kernel without a bias, and an addition if there is one."""

    def run(args: QuantisedGemmArgs) -> jax.Array:
        y = kernel(replace(args, bias=None))
        return y if args.bias is None else y + args.bias

    return run


OP = KernelOp(
    name="quantised_gemm",
    ref=of_either_order(ref.quantised_gemm),
    impls=(
        Impl(
            "native",
            _then_bias(native.quantised_gemm),
            platforms=("cpu",),
            supports=native.supports,
            ref=of_either_order(native.definition),
        ),
        Impl("tiled", _tiled, platforms=("gpu",), supports=launch.supports),
        Impl("tiled_large", _large, platforms=("gpu",), supports=large_launch.supports),
        Impl(
            "mosaic_fp8",
            _fp8_mosaic,
            platforms=("gpu",),
            supports=fp8_launch.supports,
            ref=fp8_tokens.quantised_gemm,
        ),
        Impl("xla", of_either_order(xla.quantised_gemm)),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # xla rounds weights, gate and up to the dtype, and then each intermediate result.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
    observable=sum_partials,
)


def chosen_definition(args: QuantisedGemmArgs, impl: str | None = None) -> jax.Array:
    """The definition of the implementation that runs here: some round the tokens."""
    chosen = select(OP, current_platform(), (args,), {}, impl)
    return (chosen.ref or OP.ref)(args)  # type: ignore[no-any-return]


def quantised_gemm(
    args: QuantisedGemmArgs, impl: str | None = None
) -> jax.Array:  # [T, O]; with split possibly float32[S, T, O]
    """``x`` times the transpose of ``w``, in the dtype of ``x``, accumulated in float32.

    With ``wide`` the result is float32, for logits. ``bias``, ``swiglu``, ``split`` and ``impl``
    are those of ``skinny_gemm``. Raises ValueError on arguments that do not fit together.
    """
    x, w = args.x, args.w
    if x.ndim != 2 or x.shape[1] != w.num_inputs:
        raise ValueError(f"quantised_gemm: tokens {x.shape} do not fit {w.num_inputs} inputs")
    if w.recorded is None and w.num_inputs % w.scales.shape[1]:
        raise ValueError(
            f"quantised_gemm: {w.scales.shape[1]} groups do not divide {w.num_inputs} inputs"
        )
    if w.recorded is None and w.num_outputs % w.scales.shape[0]:
        raise ValueError(
            f"quantised_gemm: {w.scales.shape[0]} blocks do not divide {w.num_outputs} outputs"
        )
    if args.swiglu and w.num_outputs % 2:
        raise ValueError(f"quantised_gemm: {w.num_outputs} outputs are not a gate and an up")
    if args.swiglu and args.split:
        raise ValueError("quantised_gemm: swiglu is not linear, so its result cannot be split")
    check_bias("quantised_gemm", args.bias, w.num_outputs, alone=not (args.swiglu or args.split))
    return dispatch(OP, (args,), {}, impl)
