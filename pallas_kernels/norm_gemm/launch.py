"""Which calls the Mosaic kernels of norm_gemm support, and the tile sizes of the dense one.

Owns: ``supports``, ``result_shapes``, ``NormGemmConfig``, ``choose_config``, and for quantised
weights ``supports_quantised``, ``quantised_result_shapes``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.checks import not_hopper
from pallas_kernels.device import current_device
from pallas_kernels.pins import Pins
from pallas_kernels.residual_norm.mosaic_launch import (
    COLUMNS,
    MAX_PARTIAL_COMPONENTS,
    MAX_WIDTH,
    TILES,
)

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
TOKEN_ROWS = 8  # token rows in shared memory: N of a wgmma; only the first is used
SMEM_BYTES = 224 << 10  # of an SM, without barriers
IN_FLIGHT_BYTES = 96 << 10  # of weights; more were no faster on an H200
MIN_STAGES = 2  # a stage is released only when the next step has begun: with one the kernel hangs
# A pin of one of these ops disables the fusion.
UNFUSED_OPS = ("residual_norm", "skinny_gemm", "swiglu_gemm")
UNFUSED_OPS_OF_QUANTISED = ("residual_norm", "quantised_gemm")


class NormGemmSizes(NamedTuple):
    """Shape of a call: [1, D] @ [D, O], or [D, 2 * O] with ``swiglu``."""

    inner: int
    outer: int
    swiglu: bool


@dataclass(frozen=True)
class NormGemmConfig:
    """Tile sizes: inner components of a K step, and steps in flight.

    A CTA computes 64 columns of the result, with ``swiglu`` from 64 gates and 64 ups.
    """

    block_k: int
    stages: int


def sizes_of(x: jax.Array, w: jax.Array, *, swiglu: bool) -> NormGemmSizes:
    """The sizes of a call's arguments."""
    return NormGemmSizes(x.shape[1], w.shape[1] // (1 + swiglu), swiglu)


def supports(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *factors: jax.Array | None,
    row: int,
    eps: float,
    swiglu: bool,
    kind: str | None,
    pins: Pins,
) -> str | None:
    """Why the Mosaic kernel of dense weights cannot run the call, or None."""
    del factors, row, eps
    if kind is not None:
        return "the weights are quantised"
    if str(x.dtype) not in DTYPES or x.dtype != w.dtype:
        return f"tokens and weights are {x.dtype} and {w.dtype}"
    if reason := _unfit(x, partials, norms, pins, UNFUSED_OPS):
        return reason
    outer = sizes_of(x, w, swiglu=swiglu).outer
    if outer % COLUMNS:
        return f"{outer} columns are not a multiple of {COLUMNS}"
    return not_hopper()


def supports_quantised(
    of_gemm: Callable[..., str | None],  # ``supports`` of the GEMM alone
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    *w: jax.Array | None,  # values, scales, zeros, offsets, supers
    row: int,
    eps: float,
    swiglu: bool,
    kind: str | None,
    pins: Pins,
) -> str | None:
    """Why a kernel of quantised weights cannot run the call, or None."""
    del row, eps
    if kind is None:
        return "the weights are not quantised"
    if reason := _unfit(x, partials, norms, pins, UNFUSED_OPS_OF_QUANTISED):
        return reason
    return of_gemm(x, *w, kind=kind, swiglu=swiglu, split=False)


def _unfit(
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    pins: Pins,
    unfused: tuple[str, ...],
) -> str | None:
    """Why no kernel can add and normalise the token, or None."""
    if pinned := [name for name in unfused if pins.of(name)]:
        return f"{pinned[0]} is pinned"
    if x.dtype != norms.dtype:
        return f"tokens and norms are {x.dtype} and {norms.dtype}"
    if x.shape[0] != 1:
        return f"there are {x.shape[0]} tokens, not one"
    if partials is None or partials.size > MAX_PARTIAL_COMPONENTS:
        return f"there are no partials to add, or more than {MAX_PARTIAL_COMPONENTS} components"
    if x.shape[1] % (TILES * COLUMNS) or x.shape[1] > MAX_WIDTH:
        return f"{x.shape[1]} components are not a multiple of {TILES * COLUMNS} up to {MAX_WIDTH}"
    return None


def result_shapes(
    x: jax.Array,  # [T, D]
    partials: jax.Array,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of the results of a call of the dense kernel."""
    del partials, norms, row, eps
    outer = sizes_of(x, w, swiglu=swiglu).outer
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, outer), x.dtype)


def quantised_result_shapes(
    x: jax.Array,  # [T, D]
    partials: jax.Array,  # [T, D] in x's dtype, or float32[S, T, D]
    norms: jax.Array,  # [W, D]
    values: jax.Array,  # [O, D] or uint8[O, D / 2]; with swiglu [2 * O, ...]: gate, up
    *factors: jax.Array | None,
    row: int,
    eps: float,
    kind: str,
    swiglu: bool,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of the results of a call of the kernels of quantised weights."""
    del partials, norms, factors, row, eps, kind
    outer = len(values) // (1 + swiglu)
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, outer), x.dtype)


def choose_config(sizes: NormGemmSizes) -> NormGemmConfig:
    """Enough bytes in flight while the norm is computed. Timed on an H200 with Qwen3-4B.

    Two CTAs fit on an SM: two of this kernel if it has more CTAs than there are SMs, else one of it
    and one of the next kernel.
    """
    budget = min(SMEM_BYTES // 2 - TOKEN_ROWS * sizes.inner * ITEM_BYTES, IN_FLIGHT_BYTES)
    component_bytes = COLUMNS * ITEM_BYTES * (1 + sizes.swiglu)  # of a K step
    shares_sm = sizes.outer // COLUMNS > current_device().num_sms
    large_fits = budget // (2 * COLUMNS * component_bytes) >= MIN_STAGES
    block_k = 2 * COLUMNS if large_fits and not shares_sm else COLUMNS
    return NormGemmConfig(block_k, budget // (block_k * component_bytes))
