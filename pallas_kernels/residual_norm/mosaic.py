"""residual_norm in Pallas Mosaic GPU, for NVIDIA Hopper: one program of one warpgroup a row.

By itself it is no faster than the kernel in Triton. But it can be linked with its neighbours
(``pdl``), which then load their weights meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pdl import let_next_begin
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS
from pallas_kernels.residual_norm.token import added_and_normed

type Ref = Any


def _kernel(
    row: int,
    eps: float,
    x: Ref,  # [T, tiles, COLUMNS]
    parts: Ref,  # [S, T, tiles, COLUMNS]
    weights: Ref,  # [W, tiles, COLUMNS]
    total: Ref,  # [T, tiles, COLUMNS]
    normed: Ref,  # [T, tiles, COLUMNS]
) -> None:
    let_next_begin()
    token = lax.axis_index("token")
    own = [parts.at[i, token] for i in range(parts.shape[0])]
    found = added_and_normed(x.at[token], own, weights.at[row], eps=eps)
    for span, added, scaled in zip(*found, strict=True):
        total[token, span] = added
        normed[token, span] = scaled


@partial(jax.jit, static_argnames=("row", "eps"))  # one trace, one kernel for all layers
def residual_norm(
    x: jax.Array,  # [T, D]
    parts: jax.Array,  # [T, D] in x's dtype, or float32[S, T, D]
    weights: jax.Array,  # [W, D]
    *,
    row: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """See ``residual_norm.api``."""
    tokens, width = x.shape
    tiles = (width // COLUMNS, COLUMNS)
    out = jax.ShapeDtypeStruct((tokens, *tiles), x.dtype)
    total, normed = plgpu.kernel(
        partial(_kernel, row, eps),
        out_type=(out, out),
        grid=(tokens,),
        grid_names=("token",),
        # Else all wait before and after each load and store.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="residual_norm",
    )(x.reshape(out.shape), parts.reshape(-1, *out.shape), weights.reshape(-1, *tiles))
    return total.reshape(x.shape), normed.reshape(x.shape)
