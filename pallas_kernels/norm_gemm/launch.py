"""Which calls the Mosaic kernels of norm_gemm support, and the tile sizes of the dense one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from pallas_kernels.lib.checks import not_hopper, unfit_norms
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
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
    gelu: bool = False


@dataclass(frozen=True)
class NormGemmConfig:
    """Tile sizes: inner components of a K step, and steps in flight.

    A CTA computes 64 columns of the result, with ``swiglu`` from 64 gates and 64 ups.
    """

    block_k: int
    stages: int


def sizes_of(args: NormGemmArgs) -> NormGemmSizes:
    """The sizes of a call of the dense kernel."""
    return NormGemmSizes(args.norm.x.shape[1], args.num_outputs, args.swiglu, args.gelu)


def supports(args: NormGemmArgs) -> str | None:
    """Why the Mosaic kernel of dense weights cannot run the call, or None."""
    if isinstance(args.w, Quantised):
        return "the weights are quantised"
    dtype = args.norm.x.dtype
    if str(dtype) not in DTYPES or dtype != args.w.dtype:
        return f"tokens and weights are {dtype} and {args.w.dtype}"
    if args.bias is not None and args.bias.dtype != dtype:
        return f"tokens and bias are {dtype} and {args.bias.dtype}"
    if reason := _unfit(args, UNFUSED_OPS, 1):
        return reason
    outer = sizes_of(args).outer
    if outer % COLUMNS:
        return f"{outer} columns are not a multiple of {COLUMNS}"
    return not_hopper()


def supports_quantised(
    of_gemm: Callable[[QuantisedGemmArgs], str | None],  # ``supports`` of the GEMM alone
    max_tokens: int,
    args: NormGemmArgs,
) -> str | None:
    """Why a kernel of quantised weights cannot run the call, or None."""
    if not isinstance(args.w, Quantised):
        return "the weights are not quantised"
    return _unfit(args, UNFUSED_OPS_OF_QUANTISED, max_tokens) or of_gemm(args.gemm(args.norm.x))


def _unfit(args: NormGemmArgs, unfused: tuple[str, ...], max_tokens: int) -> str | None:
    """Why no kernel can add and normalise the tokens, or None."""
    x, partials, norms = args.norm.x, args.norm.partials, args.norm.weights
    if pinned := [name for name in unfused if args.pins.of(name)]:
        return f"{pinned[0]} is pinned"
    if reason := unfit_norms(x, norms):
        return reason
    if not 1 <= x.shape[0] <= max_tokens:
        return f"{x.shape[0]} tokens are not between 1 and {max_tokens}"
    if partials is None or partials.size > MAX_PARTIAL_COMPONENTS * x.shape[0]:
        return f"there are no partials to add, or more than {MAX_PARTIAL_COMPONENTS} components"
    if x.shape[1] % (TILES * COLUMNS) or x.shape[1] > MAX_WIDTH:
        return f"{x.shape[1]} components are not a multiple of {TILES * COLUMNS} up to {MAX_WIDTH}"
    return None


def result_shapes(args: NormGemmArgs) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The shapes of the results of a call."""
    x, outer = args.norm.x, args.num_outputs
    return jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((len(x), outer), x.dtype)


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
