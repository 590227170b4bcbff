"""Which calls the Mosaic kernel of skinny_gemm supports, and its tile sizes.

The configuration of a call is the tuned one, else that of a heuristic.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.harness import tuned
from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.lib.device import current_device
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase, GemmSizes, sizes_of
from pallas_kernels.skinny_gemm.ref import GemmArgs

DTYPES = ("bfloat16", "float16")
ITEM_BYTES = 2
# A wgmma instruction has N up to 256; with swiglu two accumulators leave too few registers.
MAX_TOKENS_SWIGLU, MAX_TOKENS = 64, 256
MMA_TOKENS = 8  # multiple of N of a wgmma; fewer tokens are padded in shared memory
MMA_COLUMNS = 64  # M of a wgmma: columns of weights; also the inner components of a swizzled tile
SMEM_BYTES = 224 << 10  # of an SM, without barriers
STEP_BYTES = 32768  # weights and tokens of a K step
FEW_TOKENS = 16
FEW_TOKENS_IN_FLIGHT_BYTES = 96 << 10  # of weights; more were no faster on an H200
IN_FLIGHT_BYTES = 112 << 10  # the same for more tokens
MAX_SPLIT_K = 4  # each partial is written once and read once


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes.

    A CTA computes ``block_n`` columns of the result (with swiglu from ``block_n`` gates and
    ``block_n`` ups) in K steps of ``block_k`` inner components. ``stages`` steps are in flight: at
    least 2, since a stage is released only when the next step has begun. The compute
    ``warpgroups`` divide the columns if there are enough, else the tokens. ``split_k`` CTAs divide
    the inner axis.
    """

    block_n: int
    block_k: int
    stages: int
    warpgroups: int = 1
    split_k: int = 1

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes; shared memory is not checked."""
        steps, rest = divmod(sizes.inner, self.block_k)
        divides = rest == 0 and sizes.outer % self.block_n == 0
        tokens = max(sizes.tokens, MMA_TOKENS) // MMA_TOKENS
        columns = self.block_n // MMA_COLUMNS
        shared = columns % self.warpgroups == 0 or tokens % self.warpgroups == 0
        split = 1 <= self.split_k <= (steps if sizes.split else 1)
        return divides and shared and split and self.stages >= 2


def supports(args: GemmArgs) -> str | None:
    """Why the Mosaic kernel cannot run the call, or None."""
    if args.by_output or args.wide:
        return "weights are stored by output, or the result is float32"
    sizes = sizes_of(args)
    if sizes.dtype not in DTYPES or args.w.dtype != args.x.dtype:
        return f"tokens are {sizes.dtype} and weights {args.w.dtype}, not the same 16-bit dtype"
    if args.bias is not None and args.bias.dtype != args.x.dtype:
        return f"tokens are {sizes.dtype} and the bias {args.bias.dtype}"
    if not 1 <= sizes.tokens <= (max_tokens := _max_tokens(sizes)):
        return f"{sizes.tokens} tokens are not between 1 and {max_tokens}"
    if sizes.tokens > MMA_TOKENS and sizes.tokens % (
        2 * MMA_TOKENS
    ):  # two warpgroups may divide them
        return f"{sizes.tokens} tokens are not a multiple of {2 * MMA_TOKENS}"
    if sizes.inner % MMA_COLUMNS or sizes.outer % MMA_COLUMNS:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {MMA_COLUMNS}"
    return not_hopper()


def result_shapes(args: GemmArgs) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    sizes = sizes_of(args)
    return result_shape(choose_config(sizes), sizes)


def result_shape(config: GemmConfig, sizes: GemmSizes) -> jax.ShapeDtypeStruct:
    """The result of a call with this configuration: [T, O], or float32[S, T, O]."""
    shape = (sizes.tokens, sizes.outer)
    if config.split_k == 1:
        return jax.ShapeDtypeStruct(shape, sizes.dtype)
    return jax.ShapeDtypeStruct((config.split_k, *shape), jnp.float32)


def _max_tokens(sizes: GemmSizes) -> int:
    return MAX_TOKENS_SWIGLU if sizes.swiglu else MAX_TOKENS


def _split_k(sizes: GemmSizes) -> int:
    """Enough splits for a CTA on each SM; 1 where the result must not be split."""
    if not sizes.split:
        return 1
    largest = min(MAX_SPLIT_K, sizes.inner // MMA_COLUMNS)
    return max(1, min(current_device().num_sms // (sizes.outer // MMA_COLUMNS), largest))


def heuristic_config(sizes: GemmSizes) -> GemmConfig:
    """One wave of CTAs, each with enough bytes in flight. Timed on an H200 with Qwen3-4B.

    If there are more CTAs than SMs, two fit on an SM: these have twice the bytes in flight, hence
    twice the bandwidth, and all CTAs end at about the same time.
    """
    split_k = _split_k(sizes)
    ctas_per_sm = 2 if sizes.outer // MMA_COLUMNS * split_k > current_device().num_sms else 1
    weight_bytes = (1 + sizes.swiglu) * MMA_COLUMNS * ITEM_BYTES  # of an inner component
    component_bytes = weight_bytes + max(sizes.tokens, MMA_TOKENS) * ITEM_BYTES
    few = sizes.tokens <= FEW_TOKENS
    widest = 2 * MMA_COLUMNS if few else STEP_BYTES // component_bytes // ctas_per_sm
    block_k = _block_k(sizes.inner // split_k, sizes.inner, min(widest, 2 * MMA_COLUMNS))
    fitting = SMEM_BYTES // ctas_per_sm // (block_k * component_bytes)
    needed = (FEW_TOKENS_IN_FLIGHT_BYTES if few else IN_FLIGHT_BYTES) // (block_k * weight_bytes)
    warpgroups = 2 if sizes.tokens >= 2 * MMA_COLUMNS else 1
    return GemmConfig(MMA_COLUMNS, block_k, min(fitting, needed), warpgroups, split_k)


def _block_k(length: int, inner: int, widest: int) -> int:
    """The largest multiple of ``MMA_COLUMNS`` up to ``widest`` that divides the inner axis."""
    largest = min(length, max(widest, MMA_COLUMNS)) // MMA_COLUMNS
    return MMA_COLUMNS * max(n for n in range(1, largest + 1) if inner // MMA_COLUMNS % n == 0)


def _padded(sizes: GemmSizes) -> GemmSizes:
    """The sizes with the tokens padded as in shared memory, whatever the activation is: the key of
    tuned choices.
    """
    return sizes._replace(tokens=max(sizes.tokens, MMA_TOKENS), gelu=False)


def shapes_of(case: GemmCase) -> GemmSizes:
    """The key of a case's tuned choice."""
    return _padded(case.sizes)


def choose_config(sizes: GemmSizes) -> GemmConfig:
    """The tuned config for a call of these sizes on this device, else the heuristic one."""
    choice = tuned.lookup("skinny_gemm", CASES, shapes_of, _padded(sizes))
    return GemmConfig(**choice) if choice else heuristic_config(sizes)
