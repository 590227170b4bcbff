"""norm_gemm: add to the residual stream, normalise the sum, and multiply it by weights."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.harness.pins import without_pins
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.lib.checks import check_bias, check_partials
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.norm_gemm import cases, launch, ref, unfused
from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.quantised_gemm.fp8 import launch as fp8_launch
from pallas_kernels.quantised_gemm.tiled import launch as tiled_launch
from pallas_kernels.residual_norm.mosaic_launch import MAX_TOKENS

_mosaic, _tiled, _fp8 = (
    without_pins(imported_when_called(module, "norm_gemm", launch.result_shapes))
    for module in (
        "pallas_kernels.norm_gemm.mosaic",
        "pallas_kernels.quantised_gemm.tiled.mosaic",
        "pallas_kernels.quantised_gemm.fp8.mosaic",
    )
)


OP = KernelOp(
    name="norm_gemm",
    ref=ref.norm_gemm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=launch.supports),
        Impl(
            "tiled",
            _tiled,
            platforms=("gpu",),
            supports=partial(launch.supports_quantised, tiled_launch.supports, 1),
        ),
        Impl(
            "mosaic_fp8",
            _fp8,
            platforms=("gpu",),
            supports=partial(launch.supports_quantised, fp8_launch.supports, MAX_TOKENS),
            ref=ref.norm_gemm_fp8,
        ),
        Impl("unfused", unfused.unfused, ref=unfused.definition),
        Impl("xla", unfused.plain_xla),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # As for skinny_gemm; a norm rounded the other way differs by less.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
)


def norm_gemm(args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:
    """The sum of ``x`` and all partials, [T, D], and its norm times ``w``, [T, O].

    That is ``residual_norm``, then ``skinny_gemm`` (``swiglu_gemm`` with ``swiglu``,
    ``quantised_gemm`` with quantised weights) of the normalised sum, plus the ``bias``; all in the
    dtype of ``x``.
    ``pins`` may name an implementation of this op, or of those ops, which then run one after the
    other. Raises ValueError on arguments that do not fit together.
    """
    w, x, norms, row = args.w, args.norm.x, args.norm.weights, args.norm.row
    if isinstance(w, Quantised):
        inner, columns = w.num_inputs, w.num_outputs
    elif w.ndim == 2:
        inner, columns = w.shape
    else:
        raise ValueError(f"norm_gemm: weights {w.shape} are not a matrix")
    if x.ndim != 2 or x.shape[1] != inner:
        raise ValueError(f"norm_gemm: tokens {x.shape} do not fit weights of {inner} inputs")
    if norms.ndim != 2 or norms.shape[1] != x.shape[1] or not 0 <= row < norms.shape[0]:
        raise ValueError(f"norm_gemm: tokens {x.shape} do not fit row {row} of norms {norms.shape}")
    check_partials("norm_gemm", x, args.norm.partials)
    if args.gelu and (not args.swiglu or isinstance(w, Quantised)):
        raise ValueError("norm_gemm: gelu needs dense weights and swiglu")
    check_bias("norm_gemm", args.bias, columns, alone=not args.swiglu)
    if args.swiglu and columns % 2:
        raise ValueError(f"norm_gemm: {columns} columns are not a gate and an up of one width")
    return dispatch(OP, (args,), {}, args.pins.of("norm_gemm"))
