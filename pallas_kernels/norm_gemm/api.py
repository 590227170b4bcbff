"""norm_gemm: add to the residual stream, normalise, and multiply what comes out."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.checks import check_parts
from pallas_kernels.norm_gemm import apart, cases, launch, ref, xla
from pallas_kernels.pins import NO_PINS, Pins
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called

_one_launch = imported_when_called("pallas_kernels.norm_gemm.mosaic", "norm_gemm", launch.results)


def _mosaic(*args: Any, pins: Pins, **static: Any) -> Any:
    del pins  # ``supports`` has looked at them
    return _one_launch(*args, **static)


OP = KernelOp(
    name="norm_gemm",
    ref=ref.norm_gemm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=launch.supports),
        Impl("apart", apart.norm_gemm),
        Impl("xla", xla.norm_gemm),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # Those of skinny_gemm; a norm that falls to the other side of a rounding is below them.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
)


def norm_gemm(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool = False,
    pins: Pins = NO_PINS,
) -> tuple[jax.Array, jax.Array]:
    """The sum of ``x`` and all parts, [T, D], and the product of its norm with ``w``, [T, O].

    That is ``residual_norm``, and ``skinny_gemm`` or with ``swiglu`` ``swiglu_gemm`` of what it
    normalised; all in the dtype of ``x``. ``pins`` may name an implementation of this op, or of
    those, which are then run one after the other. Raises ValueError on arguments that do not fit
    together.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"norm_gemm: tokens {x.shape} do not fit weights {w.shape}")
    if norms.ndim != 2 or norms.shape[1] != x.shape[1] or not 0 <= row < norms.shape[0]:
        raise ValueError(f"norm_gemm: tokens {x.shape} do not fit row {row} of norms {norms.shape}")
    check_parts("norm_gemm", x, parts)
    if swiglu and w.shape[1] % 2:
        raise ValueError(f"norm_gemm: {w.shape[1]} columns are not a gate and an up of one width")
    static = {"row": row, "eps": eps, "swiglu": swiglu, "pins": pins}
    return dispatch(OP, (x, parts, norms, w), static, pins.of("norm_gemm"))
