"""skinny_gemm: the product of few rows with a large matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.skinny_gemm import cases, launch, ref, xla

_mosaic = imported_when_called("pallas_kernels.skinny_gemm.mosaic", "skinny_gemm", launch.results)


def _whole(out: jax.Array) -> jax.Array:  # [T, O], or float32[S, T, O] -> [T, O]
    """Parts count by their sum; no case in float16 asks for them, and float32 does not get any."""
    return out if out.ndim == 2 else out.sum(0).astype(jnp.bfloat16)


OP = KernelOp(
    name="skinny_gemm",
    ref=ref.skinny_gemm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.skinny_gemm),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # xla rounds gate and up to the dtype, and each step from there.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
    observable=_whole,
)


def skinny_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    *,
    swiglu: bool = False,
    split: bool = False,
    impl: str | None = None,
) -> jax.Array:  # [T, O], or with split perhaps float32[S, T, O]
    """``x @ w`` in the dtype of ``x``; kernels are for few tokens. Sums are in float32.

    With ``swiglu`` the result is SiLU of the first half of the columns times the second half
    (Shazeer, 2020, arXiv:2002.05202). With ``split`` it may come in parts, as many as suit the
    device, that the kernel which reads them adds up; ``residual_norm`` does. The order of sums,
    hence the bits, depends on shapes alone. ``impl`` pins an implementation. Raises ValueError on
    arguments that do not fit together.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"skinny_gemm: tokens {x.shape} do not fit weights {w.shape}")
    if swiglu and w.shape[1] % 2:
        raise ValueError(f"skinny_gemm: {w.shape[1]} columns are not a gate and an up of one width")
    if swiglu and split:
        raise ValueError("skinny_gemm: swiglu needs whole sums, so that its result is not split")
    return dispatch(OP, (x, w), {"swiglu": swiglu, "split": split}, impl)
