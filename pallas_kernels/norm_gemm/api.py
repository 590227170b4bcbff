"""norm_gemm: add to the residual stream, normalise the sum, and multiply it by weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from pallas_kernels.checks import check_partials
from pallas_kernels.norm_gemm import cases, launch, unfused
from pallas_kernels.pins import NO_PINS, Pins, without_pins
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm.fp8 import launch as fp8_launch
from pallas_kernels.quantised_gemm.tiled import launch as tiled_launch
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called

_mosaic_kernel = imported_when_called(
    "pallas_kernels.norm_gemm.mosaic", "norm_gemm", launch.result_shapes
)
_tiled = imported_when_called(
    "pallas_kernels.quantised_gemm.tiled.mosaic", "norm_gemm", launch.quantised_result_shapes
)
_fp8 = imported_when_called(
    "pallas_kernels.quantised_gemm.fp8.mosaic", "norm_gemm", launch.quantised_result_shapes
)


def _mosaic(*args: Any, pins: Pins, kind: None, **static: Any) -> Any:
    del pins, kind  # ``supports`` has checked them
    return _mosaic_kernel(*args, **static)


OP = KernelOp(
    name="norm_gemm",
    ref=unfused.reference,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=launch.supports),
        Impl(
            "tiled",
            without_pins(_tiled),
            platforms=("gpu",),
            supports=partial(launch.supports_quantised, tiled_launch.supports),
        ),
        Impl(
            "mosaic_fp8",
            without_pins(_fp8),
            platforms=("gpu",),
            supports=partial(launch.supports_quantised, fp8_launch.supports),
            ref=unfused.reference_fp8,
        ),
        Impl("unfused", unfused.unfused),
        Impl("xla", unfused.plain_xla),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # As for skinny_gemm; a norm rounded the other way differs by less.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
)


def norm_gemm(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array | Quantised,  # [D, O], or of O outputs; with swiglu of 2 * O: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool = False,
    pins: Pins = NO_PINS,
) -> tuple[jax.Array, jax.Array]:
    """The sum of ``x`` and all partials, [T, D], and its norm times ``w``, [T, O].

    That is ``residual_norm``, then ``skinny_gemm`` (``swiglu_gemm`` with ``swiglu``,
    ``quantised_gemm`` with quantised weights) of the normalised sum; all in the dtype of ``x``.
    ``pins`` may name an implementation of this op, or of those ops, which then run one after the
    other. Raises ValueError on arguments that do not fit together.
    """
    if isinstance(w, Quantised):
        inner, columns, arrays, kind = w.num_inputs, w.num_outputs, w.arrays, w.kind
    elif w.ndim == 2:
        (inner, columns), arrays, kind = w.shape, (w,), None
    else:
        raise ValueError(f"norm_gemm: weights {w.shape} are not a matrix")
    if x.ndim != 2 or x.shape[1] != inner:
        raise ValueError(f"norm_gemm: tokens {x.shape} do not fit weights of {inner} inputs")
    if norms.ndim != 2 or norms.shape[1] != x.shape[1] or not 0 <= row < norms.shape[0]:
        raise ValueError(f"norm_gemm: tokens {x.shape} do not fit row {row} of norms {norms.shape}")
    check_partials("norm_gemm", x, partials)
    if swiglu and columns % 2:
        raise ValueError(f"norm_gemm: {columns} columns are not a gate and an up of one width")
    static = {"row": row, "eps": eps, "swiglu": swiglu, "kind": kind, "pins": pins}
    return dispatch(OP, (x, partials, norms, *arrays), static, pins.of("norm_gemm"))
