"""skinny_gemm: the product of few rows with a large matrix, with what surrounds it in a layer."""

from __future__ import annotations

import jax

from pallas_kernels.registry import Impl, KernelOp, dispatch, imported_when_called
from pallas_kernels.skinny_gemm import cases, launch, mosaic_launch, ref, xla
from pallas_kernels.skinny_gemm.sizes import ARRIVALS

_mosaic = imported_when_called("pallas_kernels.skinny_gemm.mosaic", "skinny_gemm")
_triton = imported_when_called("pallas_kernels.skinny_gemm.triton", "skinny_gemm")

OP = KernelOp(
    name="skinny_gemm",
    ref=ref.skinny_gemm,
    impls=(
        Impl("mosaic", _mosaic, platforms=("gpu",), supports=mosaic_launch.supports),
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("xla", xla.skinny_gemm),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    # xla rounds gate, up and each step of the epilogue to the dtype, triton the result alone.
    tolerance={"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3},
    observable=lambda out: out.sum(0) if out.ndim == 3 else out,  # parts count by their sum
    refs=(4,),
)


def skinny_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    norm: jax.Array | None = None,  # [I]
    residual: jax.Array | None = None,  # [T, O]
    arrivals: jax.Ref | None = None,  # int32[>= ARRIVALS]
    *,
    eps: float = 0.0,
    swiglu: bool = False,
    parts: int = 1,
    impl: str | None = None,
) -> jax.Array:  # [T, O], or float32[parts, T, O]
    """``residual + f(rms_norm(x, norm, eps) @ w)`` for few tokens, in the dtype of ``x``.

    Without ``norm`` or ``residual`` (None) that step is left out. ``f`` is SiLU of the first half
    of the columns times the second half with ``swiglu``, else nothing. Sums are in float32.

    With ``parts`` above 1 the result is that many float32 arrays, to be summed by the kernel that
    reads them (``residual_norm``); which terms are in which is up to the implementation. Such a
    product has neither ``swiglu`` nor ``residual``.

    ``arrivals`` are zeros by which programs that share a tile of the result find out who is the
    last; they are zeros again afterwards, so one array serves all products of a step (None: one is
    made for this call). The order of sums, hence the bits, depends on shapes alone. ``impl`` pins
    an implementation. Raises ValueError on arguments that do not fit together.

    RMS norm: Zhang and Sennrich, 2019; SwiGLU: Shazeer, 2020 (arXiv:2002.05202).
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"skinny_gemm: tokens {x.shape} do not fit weights {w.shape}")
    if swiglu and w.shape[1] % 2:
        raise ValueError(f"skinny_gemm: {w.shape[1]} columns are not a gate and an up of one width")
    if norm is not None and norm.shape != x.shape[1:]:
        raise ValueError(f"skinny_gemm: norm {norm.shape} does not fit tokens {x.shape}")
    out = (x.shape[0], w.shape[1] // 2 if swiglu else w.shape[1])
    if residual is not None and residual.shape != out:
        raise ValueError(f"skinny_gemm: residual {residual.shape} does not fit results {out}")
    if parts < 1 or (parts > 1 and (swiglu or residual is not None)):
        raise ValueError(f"skinny_gemm: no {parts} parts with swiglu or a residual, only 1")
    if arrivals is not None and arrivals.shape[0] < ARRIVALS:
        raise ValueError(f"skinny_gemm: arrivals {arrivals.shape} are fewer than {ARRIVALS}")
    static = {"eps": eps, "swiglu": swiglu, "parts": parts}
    return dispatch(OP, (x, w, norm, residual, arrivals), static, impl)
