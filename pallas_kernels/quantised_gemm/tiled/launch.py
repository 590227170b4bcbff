"""Which calls the Hopper kernel of quantised_gemm supports, and its tile sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.checks import not_hopper
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.quantised import PACKED, Quantised
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled.arrange import KIND_OF, TILE

SCALE_DTYPES = ("bfloat16", "float16", "float32")
MMA_TOKENS = 8  # multiple of N of a wgmma; fewer tokens are padded in shared memory
MMA_INPUTS = 16  # K of a wgmma
INTEGER_TOKENS = 4  # of an integer instruction
SPAN = 512  # inputs of a token that a warpgroup rounds at once
INTEGER_INPUTS = 16, 32  # of an integer instruction
UNIT = 128  # inputs of a token that are rounded with one factor, if a warpgroup has so many
INTEGER_KINDS = "int4", "int8"
FEW_IN_FLIGHT_BYTES = 64 << 10  # of a CTA, so that the next kernel's fits beside it
MAX_TOKENS = 128  # for more ``tiled.large`` is as fast or faster
BLOCK_TOKENS = 64  # of a CTA
FEW_TOKENS = 16, 32  # see ``configs``
SCALED_GROUP = 128  # smaller groups scale weights, where there are more tokens than 8
NARROW = 8  # SMs for each CTA of gates and ups; see ``TiledSizes.is_narrow``
MAX_SPLIT_K = 4  # each partial is written once and read once
MAX_SPLIT_K_RECORDED = 5  # of K forms, whose K steps take longer; see ``_split_k``
SMEM_BYTES = 220 << 10  # of an SM, without barriers and factors
IN_FLIGHT_BYTES = 160 << 10  # of a CTA; for at most 32 tokens more steps than four are no faster
IN_FLIGHT_BYTES_OF_TWO = 75 << 10  # of each of two CTAs on an SM
MAX_STAGES = 4
ACCUMULATOR_REGISTERS = 32  # of a thread, for the groups of inputs that are multiplied at once


class TiledSizes(NamedTuple):
    """The sizes of a call: [T, K] @ [K, O], or [K, 2 * O] with ``swiglu``."""

    kind: str  # of the values, not arranged: int4, int8, fp8 or fp4
    tokens: int
    inner: int
    outer: int
    group: int  # inputs that share a scale
    super_group: int  # inputs that share a super; 0: none
    zeros: bool
    offsets: bool
    swiglu: bool
    split: bool
    wide: bool = False  # a float32 result
    block: int = 1  # outputs that share a scale; a multiple of a tile's if there are more
    normed: bool = False  # the call computes the norm of its token, which stays in shared memory
    signed: bool = False  # scales with supers may be negative

    @property
    def halves(self) -> int:
        """2 with swiglu (gate and up), else 1."""
        return 1 + self.swiglu

    @property
    def is_narrow(self) -> bool:
        """True if gates and ups have so few outputs that most SMs would have none.

        SwiGLU is not linear, so its result cannot be split: gates and ups are then two results of
        a split call, and XLA adds and multiplies. The shared expert of Qwen3.5-35B-A3B in int4 has
        512 of them: a CTA each on 8 of 132 SMs.
        """
        return self.swiglu and self.outer // TILE * NARROW <= current_device().num_sms

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of values."""
        return TILE * TILE // (2 if self.kind in PACKED else 1)

    @property
    def token_bytes(self) -> int:
        """Bytes in shared memory of a token that is normed, with the rows that fill its tiles."""
        return 2 * MMA_TOKENS * self.inner


def sizes_of(args: QuantisedGemmArgs, *, normed: bool = False) -> TiledSizes:
    """The sizes of a call's arguments."""
    (tokens, inner), form = args.x.shape, args.w.form
    return TiledSizes(
        KIND_OF[args.w.kind],
        tokens,
        inner,
        args.w.num_outputs // (1 + args.swiglu),
        args.w.group,
        form.super_group or 0,
        form.zeros,
        form.offsets,
        args.swiglu,
        args.split,
        args.wide,
        normed=normed,
        signed=form.scale_dtype == "int8",
    )


@dataclass(frozen=True)
class TiledConfig:
    """Tile sizes.

    A CTA computes 64 outputs (with swiglu from 64 gates and 64 ups) of ``block_t`` tokens. In a K
    step each of the compute ``warpgroups`` multiplies ``span`` inputs; with ``by_half`` those with
    an even index multiply gates, the others ups. ``stages`` steps are in flight. ``split_k`` CTAs
    divide the inner axis. With ``own_copies`` the first compute warpgroup issues the copies, else a
    warpgroup of its own. With ``integers`` up to 4 tokens are rounded (``integers``).
    With ``scales`` weights are scaled, and rounded to bfloat16, before they multiply; else the
    products of each group are scaled.
    """

    block_t: int
    span: int
    warpgroups: int
    stages: int
    split_k: int = 1
    by_half: bool = False
    own_copies: bool = False
    integers: bool = False
    scales: bool = False

    @property
    def block_k(self) -> int:
        """Inputs of a K step."""
        return self.span * self.warpgroups // (1 + self.by_half)

    def segment(self, group: int) -> int:
        """Inputs whose products are summed up before they are scaled."""
        return min(self.span, group)

    def rows(self, group: int) -> int:
        """Rows of scales of a K step."""
        return max(1, self.block_k // group)

    def fits(self, sizes: TiledSizes) -> bool:
        """True if the tiles divide a call of these sizes; shared memory is not checked."""
        steps, rest = divmod(sizes.inner, self.block_k)
        groups = [sizes.group, *([sizes.super_group] if sizes.super_group else [])]
        nested = all(
            max(size, group) % min(size, group) == 0
            for group in groups
            for size in (self.span, self.block_k)
        )
        split = 1 <= self.split_k <= (steps if sizes.split else 1)
        if self.integers and (
            sizes.tokens > INTEGER_TOKENS
            or sizes.kind not in INTEGER_KINDS
            or steps // self.split_k * self.block_k < SPAN
        ):
            return False
        halves = not self.by_half or (sizes.swiglu and self.warpgroups % 2 == 0)
        return rest == 0 and nested and split and halves and self.span % TILE == 0


def supports(args: QuantisedGemmArgs) -> str | None:
    """Why the Hopper kernel cannot run the call, or None."""
    x, w = args.x, args.w
    if w.kind not in KIND_OF:
        return f"{w.kind} weights are not arranged in tiles"
    if w.block_outputs > 1:
        return f"scales are those of blocks of {w.block_outputs} outputs"
    sizes = sizes_of(args)
    if x.dtype != jnp.bfloat16:
        return f"tokens are {x.dtype}, not bfloat16"
    if (reason := unfit_scales(w)) is not None:
        return reason
    if not 1 <= sizes.tokens <= MAX_TOKENS:
        return f"{sizes.tokens} tokens are not between 1 and {MAX_TOKENS}"
    if sizes.tokens > MMA_TOKENS and sizes.tokens % MMA_TOKENS:
        return f"{sizes.tokens} tokens are not a multiple of {MMA_TOKENS}"
    if sizes.inner % TILE or sizes.outer % TILE:
        return f"{sizes.inner} or {sizes.outer} components are not a multiple of {TILE}"
    if sizes.group % MMA_INPUTS or not configs(sizes):
        return f"groups of {sizes.group} inputs do not fit K steps of {sizes.inner} inputs"
    return not_hopper()


def unfit_scales(w: Quantised) -> str | None:
    """Why the kernels cannot read a matrix's scales, or None."""
    if w.supers is not None:
        return "supers are an array, not a part of records"
    if w.recorded is None and str(w.scales.dtype) not in SCALE_DTYPES:
        return f"scales are {w.scales.dtype}, not one of {', '.join(SCALE_DTYPES)}"
    return None


def result_shapes(args: QuantisedGemmArgs) -> jax.ShapeDtypeStruct:
    """The shape of a call's result."""
    sizes = sizes_of(args)
    return result_shape(choose_config(sizes), sizes)


def result_shape(config: TiledConfig, sizes: TiledSizes) -> jax.ShapeDtypeStruct:
    """The result of a call with this configuration: [T, O], or float32[S, T, O]."""
    shape = (sizes.tokens, sizes.outer)
    if config.split_k == 1:
        return jax.ShapeDtypeStruct(shape, jnp.float32 if sizes.wide else jnp.bfloat16)
    return jax.ShapeDtypeStruct((config.split_k, *shape), jnp.float32)


def _split_k(sizes: TiledSizes, steps: int) -> int:
    """Enough splits for a CTA on each SM; 1 where the result must not be split.

    One more is for K forms with which a CTA has fewer steps: Qwen2.5-1.5B's down has 35 steps of
    256 inputs for 24 tiles of outputs, so 120 of 132 SMs have 7 instead of 96 with 9.
    """
    if not sizes.split:
        return 1
    most = max(1, min(current_device().num_sms // (sizes.outer // TILE), steps))
    split_k = min(most, MAX_SPLIT_K)
    if sizes.super_group and sizes.tokens > INTEGER_TOKENS:
        further = min(most, MAX_SPLIT_K_RECORDED)
        split_k = min((split_k, further), key=lambda splits: -(-steps // splits))
    return split_k


def configs(sizes: TiledSizes) -> list[TiledConfig]:
    """The configurations whose tiles divide the call, the best first. Timed on an H100 with int4
    matrices of Qwen3-4B.

    For few tokens four compute warpgroups are the fastest. They need all registers of an SM, so
    where there are more CTAs than SMs (with swiglu) two are faster. Two such CTAs fit on an SM only
    without a memory warpgroup if they have more than 16 tokens: 64 take 20.7 us instead of 25.7.
    """
    block_t = min(BLOCK_TOKENS, -(-sizes.tokens // MMA_TOKENS) * MMA_TOKENS)
    # Small groups and offsets need more registers.
    scales = sizes.tokens > MMA_TOKENS and sizes.group < SCALED_GROUP and sizes.block == 1
    many = sizes.offsets and not scales
    most = 2 if sizes.swiglu or many or block_t > FEW_TOKENS[1] else 4
    # Q4_K's steps of 128 inputs have registers for four, with up to 64 tokens (96 of a thread).
    light = sizes.super_group > 0 and sizes.offsets and sizes.kind in PACKED and not sizes.swiglu
    small = sizes.group < TILE and block_t > FEW_TOKENS[1] and not scales
    spans = (TILE, 2 * TILE) if small else (2 * TILE, TILE)
    own_copies = sizes.swiglu and block_t > FEW_TOKENS[0]
    in_flight = IN_FLIGHT_BYTES_OF_TWO if sizes.swiglu else IN_FLIGHT_BYTES
    if sizes.normed:
        in_flight = min(in_flight, SMEM_BYTES // (1 + sizes.swiglu) - sizes.token_bytes)
    found = _integer_configs(sizes)
    for warpgroups, span in product((4, 2, 1), spans):
        by_half = sizes.swiglu and warpgroups > 1
        one = TiledConfig(block_t, span, warpgroups, 2, 1, by_half, own_copies, scales=scales)
        steps = sizes.inner // one.block_k
        if warpgroups > (4 if light and span > TILE else most) or steps == 0:
            continue
        split_k = _split_k(sizes, steps)
        weights = sizes.halves * one.block_k // TILE * sizes.tile_bytes
        step_bytes = weights + (0 if sizes.normed else one.block_k * block_t * 2)
        most_stages = MAX_STAGES + 2 * one.by_half  # whose steps are half as long
        stages = max(2, min(in_flight // step_bytes, -(-steps // split_k), most_stages))
        config = replace(one, stages=stages, split_k=split_k)
        if config.fits(sizes):
            found.append(config)
    return found


def _integer_configs(sizes: TiledSizes) -> list[TiledConfig]:
    """The configurations with integers that fit the call, the best first: a step of 64 inputs has
    nearly as many instructions as one of 128.
    """
    found = []
    long = sizes.swiglu and sizes.kind in PACKED
    spans = (4 * TILE, 2 * TILE, TILE) if long else (2 * TILE, TILE)
    for span, warpgroups in product(spans, (2,) if sizes.swiglu else (4, 2)):
        one = TiledConfig(MMA_TOKENS, span, warpgroups, 2, 1, sizes.swiglu, integers=True)
        steps = sizes.inner // one.block_k
        if steps == 0:
            continue
        split_k = _split_k(sizes, min(steps, sizes.inner // SPAN or 1))
        step_bytes = sizes.halves * one.block_k // TILE * sizes.tile_bytes
        most = max(2, min(FEW_IN_FLIGHT_BYTES // step_bytes, -(-steps // split_k)))
        config = replace(one, stages=most, split_k=split_k)
        if config.fits(sizes):
            found.append(config)
    return found


def choose_config(sizes: TiledSizes) -> TiledConfig:
    """The configuration for a call of these sizes on this device."""
    return configs(sizes)[0]
