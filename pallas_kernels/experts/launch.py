"""Which calls the Hopper kernels of experts support, their tile sizes, and the tiles of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import Activation, Stack, size_of
from pallas_kernels.experts.tiles import max_tiles
from pallas_kernels.lib.checks import not_hopper, without_triton
from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm.tiled.arrange import KIND_OF, TILE
from pallas_kernels.quantised_gemm.tiled.large import launch as large_launch
from pallas_kernels.quantised_gemm.tiled.large.launch import PAIR
from pallas_kernels.quantised_gemm.tiled.launch import (
    INTEGER_KINDS,
    TiledConfig,
    TiledSizes,
    unfit_scales,
)

MMA_TOKENS = 8  # multiple of N of a wgmma
ITEM_BYTES = 2
SMEM_BYTES = 224 << 10  # of an SM, without barriers
DTYPES = ("bfloat16", "float16")
KINDS = ("silu", "gelu_tanh")  # of activations
FEW_TOKENS = 128  # at most so many are multiplied by ``decode``
ALL_TOKENS = 64  # at most so many are all multiplied by every expert in use
ALL_TOKENS_QUANTISED = 16  # the same, where weights are unpacked before
MAX_STAGES = 8  # of K steps that are wider than a tile; twice as many of others
MANY_ITEMS = 4  # for each CTA
# Of few tokens and quantised weights, of down and of gate_up: tiles of outputs of an item,
# warpgroups for each of them, and tiles of inputs of each warpgroup in a K step. The first one that
# fits is the fastest. us on an H100 at 1, 8 and 64 tokens, of the 3 fastest of 12 combinations:
QUANTISED_TILES = (
    # Qwen3-30B-A3B, int4: 13.0, 24.2, 48.2 (12.5, 25.2, 52.1 with the next; 13.1, 25.1, 54.0)
    # gpt-oss-20b: 17.5, 49.7, 72.4 with the third (16.9, 54.9, 76.9; 17.5, 53.8, 74.2)
    ((2, 2, 2), (2, 1, 2), (1, 3, 3), (1, 1, 1)),
    # Qwen3-30B-A3B, int4: 12.8, 37.4, 84.2 (13.0, 37.7, 85.5; 12.9, 37.1, 84.0)
    # gpt-oss-20b: 24.8, 86.4, 125.3 with the second (27.5, 87.0, 127.5; 29.3, 88.8, 130.5)
    ((1, 2, 2), (2, 1, 3), (1, 2, 1)),
)
# With four compute warpgroups a thread has 96 registers. Those of more columns, where the sums of
# groups are scaled, would be spilled.
MOST_WARPGROUPS, COLUMNS_OF_FOUR = 4, 16
QUANTISED_IN_FLIGHT_BYTES = 160 << 10
MMA_COLUMNS = 256  # largest N of a wgmma
STORED_COLUMNS = 128  # of a prompt's results in shared memory at once
FEW_ROWS = 8, 16, 32  # of a tile of few tokens
WIDTHS = 64, 128  # rows of a prompt's tile
MANY_ROWS = 96  # of an expert on average, from which tiles are wide
# With quantised weights, which are unpacked for each tile: rows of a tile, and its relative time on
# an H100 (5.2, 6.7, 7.7 and 9.4 us for gates and ups of gpt-oss-20b).
TILE_COSTS = MappingProxyType({64: 112, 96: 144, 128: 176, 160: 216})
MOST_ROWS = max(*WIDTHS, *TILE_COSTS)
TILES_TOGETHER = 8  # tiles of rows whose blocks are computed at a time
STEP_BYTES = 40 << 10  # of a decode step's copies, at most


def width_of(tokens: int, chosen: int, experts: int, forms: Sequence[Tiled | None]) -> int:
    """Rows of a tile; ``forms`` are those of the weights of gate_up and of down."""
    rows = tokens * chosen / experts  # of an expert on average
    if tokens <= FEW_TOKENS:  # with two standard deviations a second tile is rare
        return next((n for n in FEW_ROWS if n >= rows + 2 * math.sqrt(rows)), FEW_ROWS[-1])
    if None in forms:
        return WIDTHS[rows > MANY_ROWS]
    most = min(form.most_rows for form in forms if form)
    widths = (width for width in TILE_COSTS if width <= most)
    return min(widths, key=lambda width: TILE_COSTS[width] * _mean_tiles(rows, width))


def _mean_tiles(rows: float, width: int) -> float:
    """Tiles of an expert with so many rows on average, whose number varies by its root."""
    beyond = (count * width for count in range(2 + int(2 * rows / width)))
    return sum(math.erfc((bound - rows) / math.sqrt(2 * rows)) for bound in beyond) / 2


class Tiled(NamedTuple):
    """The form of quantised weights in tiles, see ``TiledSizes``."""

    kind: str
    group: int
    super_group: int
    zeros: bool
    offsets: bool
    scales_weights: bool = False  # see ``tiled.step``
    block: int = 1  # outputs that share a scale
    signed: bool = False  # scales with supers may be negative

    @property
    def most_rows(self) -> int:
        """Rows of a prompt's tile at most; with more, registers would be spilled."""
        if self.scales_weights:
            return max(TILE_COSTS)
        return next(rows for group, rows in large_launch.MOST_TOKENS if self.group >= group)

    @classmethod
    def of(cls, stack: Stack) -> Tiled | None:
        """The form of a stack's weights; None of a plain one."""
        if not isinstance(stack, Quantised):
            return None
        kind, form = KIND_OF[stack.kind], stack.form
        powers = kind == "fp4" and form.scale_dtype == "bfloat16"
        signed = form.scale_dtype == "int8"
        parts = (form.zeros, form.offsets, powers, form.block_outputs, signed)
        return cls(kind, stack.group, form.super_group or 0, *parts)


class GemmSizes(NamedTuple):
    """The sizes of one of the two GEMMs."""

    experts: int
    inner: int  # K
    outer: int  # O, of each half
    halves: int  # 2: gate and up; 1: down
    tokens: int  # T
    chosen: int  # k
    tiles: int  # N
    width: int  # rows of a tile
    all_tokens: bool  # of gate_up: x are the tokens, not sorted rows
    activation: Activation | None  # of gate_up
    dtype: str
    form: Tiled | None = None  # of quantised weights

    @property
    def tiled(self) -> TiledSizes:
        """The sizes of one expert's GEMM with the columns of an item."""
        assert self.form is not None
        swiglu = self.halves == 2
        kind, group, super_group, zeros, offsets, _, block, signed = self.form
        known = (kind, self.columns, self.inner, self.outer, group, super_group)
        more = (zeros, offsets, swiglu)
        return TiledSizes(*known, *more, split=False, block=block, signed=signed)

    @property
    def pairs(self) -> int:
        """Tokens with one of their choices each."""
        return self.tokens * self.chosen

    @property
    def columns(self) -> int:
        """Tokens that are multiplied at once."""
        return -(-self.tokens // MMA_TOKENS) * MMA_TOKENS if self.all_tokens else self.width

    @property
    def few(self) -> bool:
        """True if ``decode`` multiplies, else ``prompt``."""
        return self.tokens <= FEW_TOKENS

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Rows of tiles; for few tokens the result of down: weighted outputs of each choice."""
        if self.halves == 2 or not self.few:
            return jax.ShapeDtypeStruct((self.tiles * self.width, self.outer), self.dtype)
        return jax.ShapeDtypeStruct((self.chosen, self.tokens, self.outer), jnp.float32)


def sizes_of(args: ExpertsArgs) -> tuple[GemmSizes, GemmSizes]:
    """The sizes of both GEMMs of a call of the op."""
    (tokens, chosen), width = args.choices.shape, args.x.shape[1]
    experts, hidden, _ = size_of(args.gate_up)
    forms = [Tiled.of(stack) for stack in (args.gate_up, args.down)]
    rows = width_of(tokens, chosen, experts, forms)
    tiles = max_tiles(args.choices.size, experts, rows)
    common = (tokens, chosen, tiles, rows)
    most = ALL_TOKENS if forms[0] is None else ALL_TOKENS_QUANTISED
    if hidden // 2 % (2 * TILE):  # an item of 64 outputs would read half as many tokens as weights
        most = min(most, ALL_TOKENS // 2)
    all_tokens = tokens <= most and (tokens <= MMA_TOKENS or tokens % MMA_TOKENS == 0)
    dtype = str(args.x.dtype)
    gate_up = GemmSizes(
        experts, width, hidden // 2, 2, *common, all_tokens, args.activation, dtype, forms[0]
    )
    down = GemmSizes(experts, hidden // 2, width, 1, *common, False, None, dtype, forms[1])
    return gate_up, down


def workspace_bytes(args: ExpertsArgs) -> int:
    """A bound on the bytes that the kernels need: inputs, gates, ups, hidden values, and outputs in
    float32; and rows that fill up tiles, which are inputs or outputs, and hidden values.
    """
    itemsize, (count, width, inner) = args.x.dtype.itemsize, size_of(args.down)
    elements = args.choices.size * (3 * inner + (1 + 4 // itemsize) * width)
    return (elements + count * MOST_ROWS * (inner + width)) * itemsize


def supports(args: ExpertsArgs) -> str | None:
    """Why the Hopper kernels cannot run the call, or None."""
    dtype = str(args.x.dtype)
    if dtype not in DTYPES:
        return f"tokens are {dtype}, not one of {', '.join(DTYPES)}"
    if not args.choices.size:
        return "there are no tokens"
    if args.activation.halves == 1:
        return f"the activation is {args.activation.kind}, without gates"
    if args.activation.kind not in KINDS:
        return f"the activation is {args.activation.kind}, not one of {', '.join(KINDS)}"
    for stack in (args.gate_up, args.down):
        if isinstance(stack, Quantised) and (reason := _unfit(stack, dtype)) is not None:
            return reason
    for sizes in sizes_of(args):
        if sizes.inner % TILE or sizes.outer % TILE:
            return f"{sizes.inner} or {sizes.outer} components are not a multiple of {TILE}"
        if sizes.form is None:
            continue
        block = sizes.form.block
        if block > 1 and (block % TILE or sizes.outer % block):
            return f"blocks of {block} outputs are not a multiple of {TILE} within {sizes.outer}"
        if sizes.few:
            fits = quantised_decode_config(sizes) is not None
        else:
            fits = quantised_prompt_config(sizes).fits(sizes)
        if not fits:
            return f"no K steps fit {sizes.form} and {sizes.inner} inputs of {sizes.tokens} tokens"
    return without_triton() or not_hopper()


def _unfit(stack: Quantised, dtype: str) -> str | None:
    """Why no kernel reads a stack of this form, or None."""
    if stack.kind not in KIND_OF:
        return f"{stack.kind} weights are not arranged in tiles"
    if dtype != "bfloat16":
        return f"tokens are {dtype}, not bfloat16"
    return unfit_scales(stack)


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes of ``decode``: a CTA computes ``block_n`` outputs (of gate_up as many gates and
    ups), 64 in each of the compute ``warpgroups``, in K steps of ``block_k`` inputs, of which
    ``stages`` are in flight.
    """

    block_k: int
    stages: int
    warpgroups: int = 1

    @property
    def block_n(self) -> int:
        """Outputs of a CTA's item."""
        return TILE * self.warpgroups

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes."""
        divides = sizes.inner % self.block_k == 0 and sizes.outer % self.block_n == 0
        return divides and self.block_k % TILE == 0 and self.stages >= 2


def decode_config(sizes: GemmSizes) -> DecodeConfig:
    """One wide step is a few large copies; as many of them as shared memory holds.

    Where the inputs cannot be divided into wide steps, two warpgroups share each step, if there are
    items enough for all CTAs. So 64 tokens of Gemma 4 26B-A4B, experts of width 704, take 373 us on
    an H200 with their sort, at 4,047 GB/s.
    """
    items = sizes.tiles * sizes.outer // (2 * TILE)
    odd = all(sizes.inner // TILE % n for n in (2, 3))
    wide = sizes.columns > 32 or (odd and items >= MANY_ITEMS * current_device().num_sms)
    warpgroups = 2 if wide and sizes.outer % (2 * TILE) == 0 else 1
    input_bytes = (sizes.halves * TILE * warpgroups + sizes.columns) * ITEM_BYTES
    most = max(1, STEP_BYTES // (TILE * input_bytes))
    steps = sizes.inner // TILE
    block_k = TILE * max(n for n in range(1, min(most, 4) + 1) if steps % n == 0)
    stages = SMEM_BYTES // (block_k * input_bytes)
    most = MAX_STAGES if block_k > TILE else 2 * MAX_STAGES
    return DecodeConfig(block_k, max(2, min(stages, most)), warpgroups)


@dataclass(frozen=True)
class QuantisedConfig:
    """Tile sizes of ``decode_quantised``: an item has ``outputs`` times 64 outputs (of gate_up as
    many gates and ups), and ``step`` describes the K steps of each 64.
    """

    step: TiledConfig
    outputs: int = 1

    @property
    def block_n(self) -> int:
        """Outputs of a CTA's item."""
        return TILE * self.outputs

    @property
    def block_k(self) -> int:
        """Inputs of a K step."""
        return self.step.block_k

    @property
    def stages(self) -> int:
        """K steps in flight."""
        return self.step.stages

    @property
    def warpgroups(self) -> int:
        """Compute warpgroups."""
        return self.step.warpgroups * self.outputs

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the K steps divide a call of these sizes."""
        if sizes.form is None or self.step.block_t != sizes.columns or self.step.split_k != 1:
            return False
        few = sizes.columns <= COLUMNS_OF_FOUR or sizes.form.scales_weights
        return (few or self.warpgroups < MOST_WARPGROUPS) and self.step.fits(sizes.tiled)


def quantised_decode_config(sizes: GemmSizes) -> QuantisedConfig | None:
    """The best configuration of ``decode_quantised`` whose tiles divide the call."""
    for outputs, warpgroups, inputs in QUANTISED_TILES[sizes.halves - 1]:
        by_half = sizes.halves == 2 and warpgroups > 1
        step = TiledConfig(sizes.columns, inputs * TILE, warpgroups, 2, 1, by_half)
        config = quantised_config(sizes, step, outputs)
        if config.fits(sizes):
            return config
    return None


def quantised_config(sizes: GemmSizes, step: TiledConfig, outputs: int = 1) -> QuantisedConfig:
    """As many stages as may be in flight."""
    tiles = sizes.halves * outputs
    weights = tiles * step.block_k // TILE * sizes.tiled.tile_bytes
    factors = tiles * TILE * 4 * step.rows(sizes.tiled.group)
    step_bytes = weights + factors + step.block_k * sizes.columns * ITEM_BYTES
    stages = max(2, min(QUANTISED_IN_FLIGHT_BYTES // step_bytes, MAX_STAGES))
    return QuantisedConfig(replace(step, stages=stages), outputs)


@dataclass(frozen=True)
class PromptConfig:
    """Tile sizes of ``prompt``: a CTA computes ``block_n`` outputs (of gate_up as many gates and
    ups) of a tile of rows in K steps of ``block_k`` inputs, of which ``stages`` are in flight. The
    blocks of ``group`` tiles are computed at a time. Of two compute warpgroups the first one is
    ``lead`` steps ahead, so its results are written during the matmuls of the second.
    """

    block_n: int
    block_k: int
    stages: int
    group: int = TILES_TOGETHER
    lead: int = 1

    @property
    def store_n(self) -> int:
        """Columns of results in shared memory at once."""
        return math.gcd(self.block_n, STORED_COLUMNS)

    @property
    def lanes(self) -> int:
        """Columns of a swizzled tile of results."""
        return math.gcd(self.store_n, TILE)

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes."""
        divides = sizes.inner % self.block_k == 0 and sizes.outer % self.block_n == 0
        columns = self.block_n * sizes.halves <= MMA_COLUMNS and self.block_n % MMA_TOKENS == 0
        rows = sizes.width in WIDTHS and self.block_k % TILE == 0
        # If the first warpgroup were a whole item ahead, the second would miss its barrier phase.
        lead = not self.lead or self.lead < self.stages <= sizes.inner // self.block_k
        return divides and columns and rows and lead and self.stages >= 2


@dataclass(frozen=True)
class QuantisedPromptConfig:
    """Tile sizes of ``prompt_quantised``: those of a K step of an item, of two tiles of outputs."""

    step: TiledConfig
    halves: int
    group: int = TILES_TOGETHER

    @property
    def block_n(self) -> int:
        """Outputs of a CTA's item; of gate_up as many gates and ups."""
        return TILE * PAIR // self.halves

    @property
    def block_k(self) -> int:
        """Inputs of a K step."""
        return self.step.block_k

    @property
    def stages(self) -> int:
        """K steps in flight."""
        return self.step.stages

    def fits(self, sizes: GemmSizes) -> bool:
        """True if the tiles divide a call of these sizes."""
        pair = self.step.by_half and self.step.warpgroups == PAIR and self.step.split_k == 1
        if sizes.form is None or self.step.block_t != sizes.width:
            return False
        return pair and replace(self.step, by_half=False, warpgroups=1).fits(sizes.tiled)


def fits_span(inner: int, groups: Iterable[int], span: int) -> bool:
    """True if spans divide the inputs, and groups divide spans and tiles or are divided by them."""
    pairs = product(groups, (span, TILE))
    nested = all(max(group, size) % min(group, size) == 0 for group, size in pairs)
    return inner % span == 0 and nested


def quantised_prompt_config(sizes: GemmSizes) -> QuantisedPromptConfig:
    """K steps of up to 192 inputs. Groups that are scaled one by one take registers, so with small
    groups longer steps would spill some.
    """
    assert sizes.form is not None
    form = sizes.tiled
    scales = form.kind in INTEGER_KINDS and form.block == 1
    whole = sizes.form.scales_weights or scales
    spans = (3 * TILE, 2 * TILE) if whole else (2 * TILE,) if form.group >= TILE else ()
    nested = (form.group, form.super_group or form.group)
    span = next((span for span in spans if fits_span(form.inner, nested, span)), TILE)
    step = TiledConfig(sizes.width, span, PAIR, 2, 1, by_half=True, scales=scales)
    ups = large_launch.ups_bytes(form, step)
    stages = (SMEM_BYTES - ups) // large_launch.step_bytes(form, step)
    return QuantisedPromptConfig(replace(step, stages=min(stages, MAX_STAGES)), sizes.halves)


def prompt_config(sizes: GemmSizes) -> PromptConfig:
    """As many columns as a wgmma has, and as many stages as shared memory holds."""
    most = MMA_COLUMNS // sizes.halves
    block_n = max(n for n in range(32, most + 1, 32) if sizes.outer % n == 0)
    step_bytes = (sizes.width + sizes.halves * block_n) * TILE * ITEM_BYTES
    out_bytes = sizes.width * PromptConfig(block_n, TILE, 2).store_n * ITEM_BYTES
    stages = min((SMEM_BYTES - out_bytes) // step_bytes, MAX_STAGES)
    return PromptConfig(block_n, TILE, stages, lead=1 if stages <= sizes.inner // TILE else 0)
