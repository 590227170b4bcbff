"""residual_norm in Pallas Mosaic GPU, for NVIDIA Hopper: one CTA of one warpgroup per row.

Alone it is no faster than the Triton kernel. But it can be linked with its neighbours (``pdl``),
which then load their weights while it runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lib.pdl import launch_dependents
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS
from pallas_kernels.residual_norm.ref import NormArgs
from pallas_kernels.residual_norm.token import add_and_norm

type Ref = Any


def _kernel(
    row: int,
    eps: float,
    x: Ref,  # [T, tiles, COLUMNS]
    partials: Ref,  # [S, T, tiles, COLUMNS]
    weights: Ref,  # [W, tiles, COLUMNS]
    total: Ref,  # [T, tiles, COLUMNS]
    normed: Ref,  # [T, tiles, COLUMNS]
) -> None:
    launch_dependents()
    token = lax.axis_index("token")
    token_partials = [partials.at[i, token] for i in range(partials.shape[0])]
    result = add_and_norm(x.at[token], token_partials, weights.at[row], eps=eps)
    for span, token_total, token_normed in zip(*result, strict=True):
        total[token, span] = token_total
        normed[token, span] = token_normed


@jax.jit  # one trace, one kernel for all layers
def residual_norm(args: NormArgs) -> tuple[jax.Array, jax.Array]:  # 2 * [T, D]
    """See ``residual_norm.api``."""
    x, partials = args.x, args.partials
    assert partials is not None  # ``supports`` has refused the call
    tokens, width = x.shape
    tiles = (width // COLUMNS, COLUMNS)
    out = jax.ShapeDtypeStruct((tokens, *tiles), x.dtype)
    total, normed = plgpu.kernel(
        partial(_kernel, args.row, args.eps),
        out_type=(out, out),
        grid=(tokens,),
        grid_names=("token",),
        # The automatic barriers would make all threads wait around each load and store.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="residual_norm",
    )(x.reshape(out.shape), partials.reshape(-1, *out.shape), args.weights.reshape(-1, *tiles))
    return total.reshape(x.shape), normed.reshape(x.shape)
