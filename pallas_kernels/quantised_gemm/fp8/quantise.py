"""Tokens to e4m3 in Pallas Mosaic GPU: ``tokens.quantised_tokens``, also of normed ones.

A CTA of one warpgroup quantises four groups of one or several tokens; a warp has one group of each
token, and a thread four of its values. Or it adds and normalises a whole token before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised_gemm.fp8.tokens import GROUP, LARGEST, SMALLEST, scale_tokens
from pallas_kernels.residual_norm.ref import NormArgs
from pallas_kernels.residual_norm.token import add_and_norm, span_layout

type Ref = Any

ROWS = 4  # groups of a tile: one for each warp
TOKENS = (1, 2, 4, 8)  # of a CTA: as many loads are in flight

GROUPS_LAYOUT = span_layout(GROUP)  # four groups: a warp has one, a thread four of its values
# A group of eight tokens: a warp has two tokens, a thread eight values of one.
TOKENS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, GROUP), (2, GROUP), (8,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def quantised_groups(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values, e4m3[R, GROUP], and scales, float32[R], of groups [R, GROUP] in any layout."""
    wide = groups.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(wide).max(axis=1), SMALLEST)
    scaled = wide * lax.broadcast_in_dim(LARGEST / largest, wide.shape, [0])
    return scaled.astype(jnp.float8_e4m3fn), largest * (1.0 / LARGEST)


def _kernel(
    num_tokens: int,
    x: Ref,  # [T, G, GROUP]
    values: Ref,  # [T, G, GROUP]
    scales: Ref,  # [G, scale_tokens(T)]
) -> None:
    launch_dependents()
    # The last tile may overlap the one before it; both write the same.
    first = jnp.minimum(lax.axis_index("tile") * ROWS, x.shape[1] - ROWS)
    rows = pl.ds(first, ROWS)
    token = lax.axis_index("token") * num_tokens
    load = partial(plgpu.load, layout=GROUPS_LAYOUT, optimized=False)
    grid_dependency_wait()
    loaded = [load(x.at[token + i, rows]) for i in range(num_tokens)]
    for i, groups in enumerate(loaded):
        quantised, scale = quantised_groups(groups)
        values[token + i, rows] = quantised
        scales[rows, token + i] = scale


def _tokens_of_cta(tokens: int, tiles: int) -> int:
    """The fewest tokens with which there are not more CTAs than SMs, or the most that there can be.

    A CTA of gate and up takes all registers of its SM with 64 tokens (ptxas: 155 of each of 384
    threads). Of 1,152 CTAs with one token each (70 groups, Qwen2.5-1.5B) the last could only start
    when it ended, and so the next GEMM could not start earlier and load weights either.
    """
    fitting = [n for n in TOKENS if tokens % n == 0]
    return next(
        (n for n in fitting if tokens // n * tiles <= current_device().num_sms), fitting[-1]
    )


def quantised_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, K]
    """See ``tokens.quantised_tokens``; scales of padding are not written. K is at least 512."""
    tokens, inner = x.shape
    groups = inner // GROUP
    tiles = -(-groups // ROWS)
    num_tokens = _tokens_of_cta(tokens, tiles)
    values, scales = plgpu.kernel(
        partial(_kernel, num_tokens),
        out_type=(
            jax.ShapeDtypeStruct((tokens, groups, GROUP), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((groups, scale_tokens(tokens)), jnp.float32),
        ),
        grid=(tokens // num_tokens, tiles),
        grid_names=("token", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="fp8_quantise",
    )(x.reshape(tokens, groups, GROUP))
    return values.reshape(x.shape), scales


def _norm_kernel(
    row: int,
    eps: float,
    x: Ref,  # [T, G, GROUP]
    partials: Ref,  # [S, T, G, GROUP]
    norms: Ref,  # [W, G, GROUP]
    total: Ref,  # [T, G, GROUP]
    values: Ref,  # [T, G, GROUP]
    scales: Ref,  # [G, scale_tokens(T)]
) -> None:
    launch_dependents()
    token = lax.axis_index("token")
    token_partials = [partials.at[i, token] for i in range(partials.shape[0])]
    found = add_and_norm(x.at[token], token_partials, norms.at[row], eps=eps)
    for span, token_total, normed in zip(*found, strict=True):
        total[token, span] = token_total
        values[token, span], scales[span, token] = quantised_groups(normed)


def normed_tokens(args: NormArgs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum of ``residual_norm``, [T, K], and ``quantised_tokens`` of its norm."""
    x, partials = args.x, args.partials
    assert partials is not None  # ``supports`` has refused the call
    tokens, inner = x.shape
    groups = (inner // GROUP, GROUP)
    shape = (tokens, *groups)
    total, values, scales = plgpu.kernel(
        partial(_norm_kernel, args.row, args.eps),
        out_type=(
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((groups[0], scale_tokens(tokens)), jnp.float32),
        ),
        grid=(tokens,),
        grid_names=("token",),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="fp8_residual_norm",
    )(x.reshape(shape), partials.reshape(-1, *shape), args.weights.reshape(-1, *groups))
    return total.reshape(x.shape), values.reshape(x.shape), scales
