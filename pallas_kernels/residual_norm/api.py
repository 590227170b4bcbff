"""residual_norm: add a product to the residual stream and normalise what comes out."""

from __future__ import annotations

import jax

from pallas_kernels.checks import check_parts
from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.residual_norm import cases, launch, mosaic_launch, ref, xla

_mosaic = imported_when_called(
    "pallas_kernels.residual_norm.mosaic", "residual_norm", mosaic_launch.results
)
_triton = imported_when_called("pallas_kernels.residual_norm.triton", "residual_norm")

OP = KernelOp(
    name="residual_norm",
    ref=ref.residual_norm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=mosaic_launch.supports),
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.residual_norm),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # Two roundings, each of which may fall to the other side: of the sum and of the norm.
    tolerance={"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3},
    feeds=((0, 0),),
)


def residual_norm(
    x: jax.Array,  # [T, D]
    parts: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum of ``x`` and all parts, and that sum normalised; both [T, D] in x's dtype.

    Parts are what a product cut along its inner axis leaves to be added; the sum is made in
    float32 and rounded once, and what was rounded is divided by its root mean square over D
    (``eps`` under the root). Without parts (None) ``x`` itself is the sum. ``weights`` are those of
    several norms, of which this is number ``row``: a slice of them would be a launch of its own.
    ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.

    RMS norm: Zhang and Sennrich, 2019 (arXiv:1910.07467).
    """
    if x.ndim != 2 or weights.ndim != 2 or x.shape[1] != weights.shape[1]:
        raise ValueError(f"residual_norm: tokens {x.shape} do not fit weights {weights.shape}")
    if not 0 <= row < weights.shape[0]:
        raise ValueError(f"residual_norm: there is no row {row} in weights {weights.shape}")
    check_parts("residual_norm", x, parts)
    return dispatch(OP, (x, parts, weights), {"row": row, "eps": eps}, impl)
