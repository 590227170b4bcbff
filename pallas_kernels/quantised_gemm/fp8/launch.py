"""Which calls the fp8 kernels support, and their tile sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.lib.device import current_device
from pallas_kernels.quantised_gemm.fp8.tokens import GROUP
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_mlp.ref import MlpArgs

DTYPES = ("bfloat16", "float16")
MMA_TOKENS = 8  # multiple of N of a wgmma; fewer tokens are padded in shared memory
MMA_ROWS = 64  # M of a wgmma
SMEM_BYTES = 226 << 10  # of an SM, without barriers
MAX_DECODE_TOKENS = 256  # N of a wgmma
MAX_DECODE_TOKENS_SWIGLU = 64  # with more a tile of 128 tokens has as few waves
MIN_GROUPS = 4  # of the inputs: those that a CTA quantises at once
FEW_TOKENS = 16
MAX_SHARING_TOKENS = 64  # accumulators for more leave one CTA to an SM
QUANTISED_TOKENS = (1, 8, 16)  # the kernel for few tokens can quantise so many itself
# On an H100 that takes 0.3 us for 20 groups of 8 tokens, but 3 us for 26 of them and 5 us for 20 of
# 16 tokens, longer than a kernel of its own: loads come in batches, and each waits for L2.
MAX_QUANTISED_GROUPS = 20
MAX_TOKEN_GROUPS = 40  # of one token: five tiles in shared memory and in registers
FEW_TOKENS_IN_FLIGHT_BYTES = 96 << 10  # of weights in an SM, as in skinny_gemm
IN_FLIGHT_BYTES = 112 << 10
MAX_SPLIT_K = 4
MAX_PROMPT_STAGES = 8
# Relative time of a multiplication, by warpgroups and accumulators of a tile. The first two on an
# H100 with 8,192 tokens of Qwen3-4B: qkv 251 and 254 us, down 372 and 394, gate and up 811 and 792.
TILE_COSTS = MappingProxyType({(2, 2): 1.0, (3, 1): 1.02, (2, 1): 1.2})
# With scales of blocks ptxas 13.5 spills sums of two accumulators, in a K step 75 loads and stores
# of a thread: 600 cycles of shared memory where the wgmmas take 1,024. Estimated, not timed.
SPILL_COST = 1.4
MMA_WEIGHTS = 128  # N of a wgmma of the kernel for many tokens


class Fp8Sizes(NamedTuple):
    """The sizes of a call: [T, K] times [O, K], or [2 * O, K] with ``swiglu``."""

    tokens: int
    inner: int
    outer: int
    swiglu: bool
    split: bool
    blocks: bool  # blocks of 128 x 128 weights share a scale; else rows do
    dtype: str

    @property
    def groups(self) -> int:
        """Groups of inputs, each with a scale for each token."""
        return self.inner // GROUP


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes for few tokens.

    A CTA computes ``block_o`` outputs (with swiglu from as many gates and ups) of all tokens. A K
    step has ``step_groups`` groups of inputs, and ``stages`` steps are in flight. The compute
    ``warpgroups`` divide the tokens, or have 64 outputs each (``divides_outputs``). ``split_k``
    CTAs divide the inputs. If the kernel ``quantises`` the tokens, the only compute warpgroup does
    so before its first step.
    """

    step_groups: int
    stages: int
    warpgroups: int = 1
    split_k: int = 1
    quantises: bool = False
    divides_outputs: bool = False

    @property
    def block_o(self) -> int:
        """Outputs of a CTA."""
        return MMA_ROWS * (self.warpgroups if self.divides_outputs else 1)

    def fits(self, sizes: Fp8Sizes) -> bool:
        """True if the tiles divide a call of these sizes; shared memory is not checked."""
        steps, rest = divmod(sizes.groups, self.step_groups)
        rest += sizes.outer % self.block_o
        tokens = max(sizes.tokens, MMA_TOKENS)
        split = 1 <= self.split_k <= (steps if sizes.split else 1)
        alone = self.divides_outputs or self.warpgroups == 1
        shared = alone or tokens % (self.warpgroups * MMA_TOKENS) == 0
        groups = steps // self.split_k * self.step_groups
        few = sizes.tokens in QUANTISED_TOKENS and (groups >= MIN_GROUPS or sizes.tokens > 1)
        quantises = not self.quantises or (few and self.warpgroups == 1)
        return rest == 0 and split and shared and quantises and self.stages >= 1


@dataclass(frozen=True)
class PromptConfig:
    """Tile sizes for many tokens.

    A persistent CTA computes tiles of 64 tokens for each of its compute ``warpgroups``, and of 128
    weights for each of a warpgroup's accumulators, ``accs``. With swiglu half of the weights are
    gates, half are ups. ``stages`` groups of inputs are in flight. Tiles that are computed at the
    same time are adjacent, ``group`` of them along the tokens.
    """

    warpgroups: int
    accs: int
    stages: int
    group: int = 4

    @property
    def block_t(self) -> int:
        """Tokens of a tile."""
        return MMA_ROWS * self.warpgroups

    def smem_bytes(self, sizes: Fp8Sizes) -> int:
        """Shared memory of a CTA for tokens, weights, scales and results."""
        step = (self.block_t + self.accs * MMA_WEIGHTS) * GROUP + 4 * self.block_t
        width = MMA_WEIGHTS // (2 if sizes.swiglu and self.accs == 1 else 1)
        return self.stages * step + 2 * self.block_t * width

    def fits(self, sizes: Fp8Sizes) -> bool:
        """True if the kernel can run a call of these sizes with this configuration."""
        divides = sizes.outer * (1 + sizes.swiglu) % (self.accs * MMA_WEIGHTS) == 0
        ranges = self.warpgroups in (2, 3) and self.accs in (1, 2) and self.stages >= 2
        return divides and ranges and self.smem_bytes(sizes) <= SMEM_BYTES


def sizes_of(args: QuantisedGemmArgs) -> Fp8Sizes:
    """The sizes of a call's arguments."""
    (tokens, inner), w = args.x.shape, args.w
    blocks = w.scales.shape != (w.num_outputs, 1)
    outer = w.num_outputs // (1 + args.swiglu)
    return Fp8Sizes(tokens, inner, outer, args.swiglu, args.split, blocks, str(args.x.dtype))


def supports(args: QuantisedGemmArgs) -> str | None:
    """Why the Mosaic kernels cannot run the call, or None."""
    w = args.w
    if args.wide:
        return "the result has the tokens' dtype"
    if w.kind != "fp8" or any(part is not None for part in (w.zeros, w.offsets, w.supers)):
        return "the matrix is not fp8 with scales alone"
    if str(args.x.dtype) not in DTYPES:
        return f"tokens are {args.x.dtype}, not 16-bit"
    return _unfit(sizes_of(args), w.num_outputs, w.scales.shape) or not_hopper()


def _unfit(sizes: Fp8Sizes, rows: int, scales: tuple[int, ...]) -> str | None:
    """Why no kernel can take these sizes, with a matrix of ``rows``, or None."""
    if sizes.tokens < 1:
        return "there are no tokens"
    if sizes.tokens > MMA_TOKENS and sizes.tokens % MMA_TOKENS:
        return f"{sizes.tokens} tokens are not a multiple of {MMA_TOKENS}"
    outputs = MMA_ROWS if decodes(sizes) or sizes.swiglu else GROUP
    if sizes.inner % GROUP or sizes.groups < MIN_GROUPS or sizes.outer % outputs:
        return (
            f"{sizes.inner} inputs are not a multiple of {GROUP} from {MIN_GROUPS * GROUP} on, or "
            f"{sizes.outer} outputs not of {outputs}"
        )
    if sizes.blocks and (scales != (rows // GROUP, sizes.groups) or sizes.outer % GROUP):
        return f"scales {scales} are neither of rows nor of blocks of {GROUP} x {GROUP} weights"
    return None


def decodes(sizes: Fp8Sizes) -> bool:
    """True if the kernel for few tokens runs a call of these sizes."""
    return sizes.tokens <= (MAX_DECODE_TOKENS_SWIGLU if sizes.swiglu else MAX_DECODE_TOKENS)


def result_shapes(args: QuantisedGemmArgs) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    sizes = sizes_of(args)
    return result_shape(sizes, decode_config(sizes).split_k if decodes(sizes) else 1)


def supports_mlp(args: MlpArgs) -> str | None:
    """Why the kernels cannot keep SwiGLU's results quantised, or None."""
    if args.pins.of("quantised_gemm"):
        return "quantised_gemm is pinned"
    if reason := supports(args.first):
        return reason
    sizes = sizes_of(args.first)
    if decodes(sizes):
        return f"{sizes.tokens} tokens are not more than {MAX_DECODE_TOKENS_SWIGLU}"
    if sizes.blocks:  # two accumulators, for whole groups of results, would spill: SPILL_COST
        return "blocks of gates and ups share a scale"
    if sizes.outer % GROUP:
        return f"{sizes.outer} gates are not a multiple of {GROUP}"
    return supports(_second(args))


def mlp_result_shapes(args: MlpArgs) -> jax.ShapeDtypeStruct:
    """The shape of the result of both matmuls."""
    return result_shapes(_second(args))


def _second(args: MlpArgs) -> QuantisedGemmArgs:
    hidden: Any = jax.ShapeDtypeStruct((len(args.x), args.down.num_inputs), args.x.dtype)
    return args.second(hidden)


def result_shape(sizes: Fp8Sizes, split_k: int) -> jax.ShapeDtypeStruct:
    """The result of a call: [T, O], or float32[S, T, O]."""
    shape = (sizes.tokens, sizes.outer)
    if split_k == 1:
        return jax.ShapeDtypeStruct(shape, sizes.dtype)
    return jax.ShapeDtypeStruct((split_k, *shape), jnp.float32)


def decode_config(sizes: Fp8Sizes, *, quantises: bool | None = None) -> DecodeConfig:
    """One wave of CTAs, each with enough bytes in flight, as ``skinny_gemm`` chooses them.

    ``quantises`` is False for tokens that are quantised already, None for the faster choice.

    If there are more tiles of 64 outputs than SMs, two CTAs fit on an SM while they need at most
    128 registers for a thread. With more tokens a CTA has two such tiles.
    """
    tiles, num_sms = sizes.outer // MMA_ROWS, current_device().num_sms
    largest = min(MAX_SPLIT_K, sizes.groups) if sizes.split else 1
    split_k = max(1, min(num_sms // tiles, largest))
    few, halves = sizes.tokens <= FEW_TOKENS, 1 + sizes.swiglu
    crowded = tiles * split_k > num_sms
    pairs = crowded and halves * sizes.tokens > MAX_SHARING_TOKENS and tiles % 2 == 0
    divisible = sizes.tokens % (2 * MMA_TOKENS) == 0 and sizes.tokens >= 2 * MMA_ROWS
    warpgroups = 2 if pairs or divisible else 1
    divides_outputs = pairs and sizes.tokens <= MMA_ROWS
    step_groups = math.gcd(sizes.groups, 2 if few and not sizes.swiglu else 1)
    blocks = 2 if divides_outputs else 1
    weight_bytes = step_groups * halves * blocks * MMA_ROWS * GROUP
    padded = max(sizes.tokens, MMA_TOKENS)
    token_bytes = step_groups * (padded * GROUP + 4 * (padded + 32))
    budget, step_bytes = (
        SMEM_BYTES // (2 if crowded and not pairs else 1),
        weight_bytes + token_bytes,
    )
    steps = sizes.groups // step_groups
    if quantises is None:
        quantises = _quantises(sizes, steps // split_k * step_groups)
    if quantises:
        budget -= -(-steps // split_k) * token_bytes
        step_bytes = weight_bytes
    fitting = budget // step_bytes
    needed = blocks * (FEW_TOKENS_IN_FLIGHT_BYTES if few else IN_FLIGHT_BYTES) // weight_bytes
    return DecodeConfig(
        step_groups,
        min(fitting, needed),
        warpgroups,
        split_k,
        quantises,
        divides_outputs,
    )


def _quantises(sizes: Fp8Sizes, groups: int) -> bool:
    """True if a CTA with so many groups should quantise its tokens itself."""
    few = sizes.tokens == 1 and MIN_GROUPS <= groups <= MAX_TOKEN_GROUPS
    return few or (sizes.tokens == MMA_TOKENS and groups <= MAX_QUANTISED_GROUPS)


def prompt_config(sizes: Fp8Sizes) -> PromptConfig:
    """The tiles with the least time, estimated as waves times the time of a tile."""
    made = [_prompt(warpgroups, accs, sizes) for warpgroups, accs in TILE_COSTS]
    return min((config for config in made if config.fits(sizes)), key=lambda c: _cost(c, sizes))


def quantising_config(sizes: Fp8Sizes) -> PromptConfig:
    """Tiles with whole groups of results of SwiGLU, so that the kernel can quantise them."""
    return _prompt(2, 2, sizes)


def _prompt(warpgroups: int, accs: int, sizes: Fp8Sizes) -> PromptConfig:
    """As many stages as fit in shared memory."""
    stages = range(MAX_PROMPT_STAGES, 1, -1)
    made = (PromptConfig(warpgroups, accs, n) for n in stages)
    return next(config for config in made if config.smem_bytes(sizes) <= SMEM_BYTES)


def _cost(config: PromptConfig, sizes: Fp8Sizes) -> float:
    """Relative time."""
    columns = sizes.outer * (1 + sizes.swiglu) // (config.accs * MMA_WEIGHTS)
    waves = -(-columns * -(-sizes.tokens // config.block_t) // current_device().num_sms)
    cost = TILE_COSTS[config.warpgroups, config.accs]
    cost *= SPILL_COST if sizes.blocks and config.accs == 2 else 1
    return waves * config.warpgroups * config.accs * cost
