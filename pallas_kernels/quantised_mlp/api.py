"""quantised_mlp: SwiGLU of tokens times a quantised matrix, times a second one."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.numerics import sum_partials
from pallas_kernels.pins import NO_PINS, Pins, without_pins
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm.fp8 import launch as fp8_launch
from pallas_kernels.quantised_mlp import cases, unfused
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called

_fp8 = imported_when_called(
    "pallas_kernels.quantised_gemm.fp8.mosaic", "mlp", fp8_launch.mlp_result_shapes
)


def _supports_fp8(*args: Any, pins: Pins, **static: Any) -> str | None:
    if pins.of("quantised_gemm"):
        return "quantised_gemm is pinned"
    return fp8_launch.supports_mlp(*args, **static)


OP = KernelOp(
    name="quantised_mlp",
    ref=unfused.reference,
    impls=(
        Impl(
            "mosaic_fp8",
            without_pins(_fp8),
            platforms=("gpu",),
            supports=_supports_fp8,
            ref=unfused.reference_fp8,
        ),
        Impl("unfused", unfused.unfused),
        Impl("xla", unfused.plain_xla),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # float32 as for quantised_gemm. The tensor cores' 14 bits let fp8 round some hidden values the
    # other way, by an eighth of them: 0.038 on an H100 with 264 tokens, 0.055 in simulations.
    tolerance={"float32": 1e-5, "bfloat16": 6e-2, "float16": 6e-2},
    observable=sum_partials,
)


def quantised_mlp(
    x: jax.Array,  # [T, D]
    gate_up: Quantised,  # of D inputs and 2 * F outputs: gate, up
    down: Quantised,  # of F inputs
    *,
    split: bool = False,
    pins: Pins = NO_PINS,
) -> jax.Array:  # [T, D]; with split possibly float32[S, T, D]
    """``quantised_gemm`` with ``swiglu`` times ``gate_up``, then that of the result times ``down``.

    Hidden values have the dtype of ``x``, or are quantised without such a rounding. ``split`` is
    that of the second one. ``pins`` may name an implementation of this op, or of
    ``quantised_gemm``. Raises ValueError on arguments that do not fit together.
    """
    if x.ndim != 2 or x.shape[1] != gate_up.num_inputs:
        raise ValueError(f"quantised_mlp: tokens {x.shape} do not fit {gate_up.num_inputs} inputs")
    if gate_up.num_outputs != 2 * down.num_inputs:
        raise ValueError(
            f"quantised_mlp: {gate_up.num_outputs} outputs are not twice {down.num_inputs} inputs"
        )
    static = {"kinds": (gate_up.kind, down.kind), "split": split, "pins": pins}
    return dispatch(OP, (x, *gate_up.arrays, *down.arrays), static, pins.of("quantised_mlp"))
