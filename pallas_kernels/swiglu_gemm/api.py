"""swiglu_gemm: tokens times gates and ups, and their SwiGLU."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.skinny_gemm import launch as few
from pallas_kernels.swiglu_gemm import cases, launch, ref, xla

_many = imported_when_called("pallas_kernels.swiglu_gemm.mosaic", "swiglu_gemm", launch.results)
_few = partial(
    imported_when_called("pallas_kernels.skinny_gemm.mosaic", "skinny_gemm", few.results),
    swiglu=True,
    split=False,
)

OP = KernelOp(
    name="swiglu_gemm",
    ref=ref.swiglu_gemm,
    impls=(
        Impl("mosaic", _many, platforms=("gpu",), supports=launch.supports),
        Impl("skinny_gemm", _few, ("gpu",), partial(few.supports, swiglu=True, split=False)),
        Impl("xla", xla.swiglu_gemm),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # xla rounds gate and up to the dtype, and each step from there.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
)


def swiglu_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
    *,
    impl: str | None = None,
) -> jax.Array:  # [T, O]
    """SiLU of ``x`` times the first half of the columns, times ``x`` times the second half.

    In the dtype of ``x``; sums are in float32. Their order, hence the bits, depends on shapes
    alone. ``impl`` pins an implementation. Raises ValueError on arguments that do not fit together.

    SwiGLU: Shazeer, 2020 (arXiv:2002.05202).
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"swiglu_gemm: tokens {x.shape} do not fit weights {w.shape}")
    if w.shape[1] % 2:
        raise ValueError(f"swiglu_gemm: {w.shape[1]} columns are not a gate and an up of one width")
    return dispatch(OP, (x, w), {}, impl)
