"""The matmuls of one K step of the Hopper kernels of quantised_gemm.

A compute warpgroup loads packed values from shared memory, makes them bfloat16 without rounding and
multiplies them, as operand A of wgmma in registers. The products of a group of inputs are summed up
by the tensor cores, then scaled in float32 and added to the result. An offset of a group multiplies
the sum of the tokens' inputs, which is one more matmul, with ones. Scales of fp4 in bfloat16, those
of MXFP4, are powers of 2: they multiply the operand, exactly, and steps add to one sum. Where a
block of outputs shares a scale (fp8), it is a scalar that is read from global memory. Factors with
supers are words of records (``records``), of which a step copies the values and all factors; how
they multiply weights of more than eight tokens is in ``scaled_tiles``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogues import swiglu_of_many, transposed, write_columns, write_rows
from pallas_kernels.gemm.pipeline import Ring
from pallas_kernels.lib.quantised import MIDDLE, Quantised
from pallas_kernels.quantised_gemm.tiled import fragments, records, scaled_tiles
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.fragments import divisor, operand
from pallas_kernels.quantised_gemm.tiled.launch import (
    ACCUMULATOR_REGISTERS,
    INTEGER_INPUTS,
    MMA_TOKENS,
    UNIT,
    TiledConfig,
    TiledSizes,
)
from pallas_kernels.residual_norm.token import Norm

type Ref = Any

ROW_BYTES = 256  # of tiles in shared memory; a TMA copy has at most 256 elements in each dimension
FACTORS_OF_WORD = 4


@dataclass(frozen=True)
class Spec:
    """Compile-time constants of the kernel."""

    sizes: TiledSizes
    config: TiledConfig
    sums_given: bool = False  # the sums of the tokens' inputs, which offsets multiply
    norm: Norm | None = None  # of the only token, if the kernel computes it

    @property
    def segment(self) -> int:
        """Inputs whose products are summed up before they are scaled."""
        if self.integer_scales:
            return self.config.segment(self.sizes.super_group)
        return self.config.span if self.by_tile else self.config.segment(self.sizes.group)

    @property
    def by_tile(self) -> bool:
        """True if weights of records are scaled, a tile at a time."""
        return self.config.scales and self.sizes.super_group > 0

    @property
    def integer_scales(self) -> bool:
        """True if weights are multiplied by scales as integers, and products by supers."""
        return self.by_tile and not self.sizes.offsets

    @property
    def weight_unit(self) -> float:
        """The power of two by which all results are divided until their sum is complete."""
        return scaled_tiles.UNIT if self.by_tile and self.sizes.offsets else 1.0

    @property
    def chunk(self) -> int:
        """Inputs of one wgmma call: a swizzled row of tokens; or of one call of integers."""
        if self.config.integers:
            return max(chunk for chunk in INTEGER_INPUTS if self.sizes.group % chunk == 0)
        return min(self.segment, TILE)

    @property
    def unit(self) -> int:
        """Inputs of a row of tokens: those that share a factor as integers, or of a chunk."""
        if not self.config.integers:
            return self.chunk
        return min(UNIT, self.config.span, self.sizes.super_group or UNIT)

    @property
    def results(self) -> int:
        """Results of a compute warpgroup: 2 for gates and ups, else 1."""
        return 1 if self.config.by_half else self.sizes.halves

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of values."""
        return self.sizes.tile_bytes // ROW_BYTES

    @property
    def value_rows(self) -> int:
        """Rows of values in a record."""
        return self.sizes.super_group // TILE * self.tile_rows

    @property
    def small_rows(self) -> int:
        """Rows of scales in a record, and of offsets."""
        return records.small_rows(self.sizes.group, self.sizes.super_group)

    @property
    def record_inputs(self) -> int:
        """Inputs of a record that a K step has."""
        return min(self.config.block_k, self.sizes.super_group)


class Parts(NamedTuple):
    """The factors of groups; None where the form has none. Records have all in ``words``."""

    scales: Any = None
    zeros: Any = None
    offsets: Any = None
    words: Any = None


class Gmem(NamedTuple):
    """Refs to the arrays in global memory; outputs are divided into halves and tiles."""

    x: Ref  # [T, K]; with integers [T, K / chunk, chunk]; with a norm ``NormRefs``
    values: Ref  # [halves, O / 64, K / 64, rows, ROW_BYTES]; records [halves, O / 64, S, rows, 64]
    # [halves, O / 64, groups, 64] each; scales of blocks [halves, O / block, groups]; of records
    # there are none
    parts: Parts
    bias: Ref = None  # [O]
    sums: Ref = None  # float32[groups, T] of a step whose sums of inputs are given
    total: Ref = None  # the sum of a normed token
    out: Ref = None  # [T, O], or float32[S, T, O]


def gmem_views(
    sizes: TiledSizes,
    w: Quantised,  # a matrix, or a stack of them
    matrices: int = 1,
) -> tuple[jax.Array, Parts]:
    """The arrays of a matrix in the shapes of ``Gmem``; several matrices follow one another."""
    outer = (matrices * sizes.halves, sizes.outer // TILE)
    if w.recorded is not None:
        return w.values.reshape(*outer, *w.values.shape[-3:]), Parts()
    rows = sizes.tile_bytes // ROW_BYTES
    values, scales, zeros, offsets, _ = w.arrays
    if sizes.block > 1:
        scales = scales.reshape(outer[0], sizes.outer // sizes.block, -1)
    else:
        scales = scales.reshape(*outer, -1, TILE)
    rest = (x if x is None else x.reshape(*outer, -1, TILE) for x in (zeros, offsets))
    return values.reshape(*outer, sizes.inner // TILE, rows, ROW_BYTES), Parts(scales, *rest)


def input_sums(x: jax.Array, group: int) -> jax.Array:  # [T, K] to float32[K / group, T]
    """The sums of each token's inputs by group, which offsets multiply."""
    return x.astype(jnp.float32).reshape(len(x), -1, group).sum(axis=2).T


def zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def matmuls(
    sums: Sequence[Iterable[tuple[jax.Array, Ref]]],  # bfloat16[64, inputs], [inputs, tokens]
    tokens: int,
    totals: Sequence[jax.Array] | None = None,  # float32[64, tokens] each
) -> list[jax.Array]:  # float32[64, tokens] each
    """The sums of matmuls, added to ``totals``. JAX's interpreter has no wgmma with an operand in
    registers.
    """

    def multiply(accs: list[Ref]) -> None:
        for acc, operands in zip(accs, sums, strict=True):
            for a, x in operands:
                plgpu.wgmma(acc, a, x)

    def from_zero(accs: list[Ref]) -> list[jax.Array]:
        multiply(accs)
        return [acc[...] for acc in accs]

    if totals is not None:
        init: Any = [plgpu.WGMMAAccumulatorRef.init(total) for total in totals]
        return pl.run_state(multiply)(init)
    acc = plgpu.WGMMAAccumulatorRef((TILE, tokens), jnp.float32)
    return pl.run_scoped(from_zero, [acc] * len(sums))


@dataclass(frozen=True)
class Step:
    """A compute warpgroup's inputs of a K step."""

    spec: Spec
    stage: jax.Array
    warpgroup: jax.Array
    scratch: Any  # x_smem, values_smem, parts_smem, perhaps sums_given_smem
    number: jax.Array  # among the K steps of the matrix
    # float32 scalars by result and segment: the scales of blocks of outputs
    block_scales: Sequence[Sequence[jax.Array]] = field(default=(), kw_only=True)
    # words of records by result, their first group in the span, and offset among the rows
    loaded: dict[tuple[int, int, int], jax.Array] = field(default_factory=dict, kw_only=True)

    @property
    def scales_weights(self) -> bool:
        """True if scales multiply weights, not sums."""
        return self.are_powers or (self.spec.config.scales and not self.spec.integer_scales)

    @property
    def are_powers(self) -> bool:
        """True for scales of MXFP4, with which weights are exact in bfloat16."""
        scales = self.scratch.parts_smem.scales
        return self.spec.sizes.kind == "fp4" and scales.dtype == jnp.bfloat16

    @property
    def first_input(self) -> jax.Array:
        """The warpgroup's first input in the stage."""
        by_half = self.spec.config.by_half
        index = lax.div(self.warpgroup, jnp.int32(2)) if by_half else self.warpgroup
        return index * self.spec.config.span

    def half(self, result: int) -> jax.Array | int:
        """The half of the weights of one of the warpgroup's results."""
        by_half = self.spec.config.by_half
        return lax.rem(self.warpgroup, jnp.int32(2)) if by_half else result

    def with_block_scales(
        self,
        scales: Ref,  # float32[matrices * halves, O / block, groups]
        matrix: jax.Array,
        first_output: jax.Array,
        step: jax.Array,  # among those of the matrix
    ) -> Step:
        """The step with its scales of blocks, if it has any; they are read here, before the copies
        have arrived.
        """
        sizes, spec = self.spec.sizes, self.spec
        if sizes.block == 1:
            return self
        apart = sizes.swiglu and spec.config.by_half
        halves = [lax.rem(self.warpgroup, jnp.int32(2))] if apart else range(spec.results)
        block = lax.div(first_output, jnp.int32(sizes.block))
        block = jnp.minimum(block, sizes.outer // sizes.block - 1)  # for a missing tile
        first = step * spec.config.block_k + self.first_input
        starts = range(0, spec.config.span, spec.segment)
        groups = [lax.div(first + start, jnp.int32(sizes.group)) for start in starts]
        found = [
            [
                scales[matrix * sizes.halves + half, block, group].astype(jnp.float32)
                for group in groups
            ]
            for half in halves
        ]
        return replace(self, block_scales=found)

    def factor(self, part: Ref, result: int, row: jax.Array | int) -> jax.Array:  # float32[64]
        """A row of factors of the tile's outputs."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        factors = part.at[self.stage, 0, self.half(result), row]
        return plgpu.load(factors, layout=layout, optimized=False).astype(jnp.float32)

    def row(self, group: int, segment: int) -> jax.Array:
        """The row of a segment in the factors of groups."""
        spec = self.spec
        if group >= spec.config.block_k:
            return jnp.int32(0)
        start = self.first_input + segment * spec.segment
        return lax.div(start, jnp.int32(group))

    def scale(self, result: int, segment: int) -> tuple[jax.Array, jax.Array | None]:
        """Scale and offset of a segment, float32[64] each, or the scale of a block."""
        sizes, parts = self.spec.sizes, self.scratch.parts_smem
        if self.block_scales:
            return self.block_scales[result][segment], None
        if sizes.super_group:
            return self.recorded_scale(result, segment)
        row = self.row(sizes.group, segment)
        scale = self.factor(parts.scales, result, row)
        offset = self.factor(parts.offsets, result, row) if sizes.offsets else None
        return scale * divisor(sizes.kind), offset

    def recorded_scale(
        self, result: int, segment: int
    ) -> tuple[jax.Array, jax.Array | None]:  # float32[64]
        """``scale`` of records, whose offsets are integers (``integer_offsets``)."""
        sizes, start = self.spec.sizes, segment * self.spec.segment
        supers = self.supers(result, start)
        if self.spec.integer_scales:
            return records.half(supers, 0) * scaled_tiles.INTEGER_UNIT, None
        large = records.half(supers, 0) * divisor(sizes.kind)
        return self.byte(result, start, 0) * large, None

    def recorded_tile(self, result: int, index: int) -> jax.Array:  # bfloat16[64, 64]
        """A tile of records, scaled; see ``scaled_tiles``."""
        sizes, start = self.spec.sizes, index * TILE
        place = lax.div(self.first_input, jnp.int32(TILE)) + index
        tile = self.tile_ref(self.half(result), place)

        kinds = (0,) if self.spec.integer_scales else (0, self.spec.small_rows)
        found = [self.word(result, start, first) for first in kinds]
        words, byte = [words for words, _ in found], found[0][1]
        if not isinstance(byte, int):
            words = [lax.shift_right_logical(one, records.shift(one, byte)) for one in words]
            byte = 0
        groups, signed = range(byte, byte + max(1, TILE // sizes.group)), sizes.signed
        if self.spec.integer_scales:
            return scaled_tiles.times_integers(sizes.kind, tile, words[0], groups, signed=signed)
        words.append(self.supers(result, start))
        return scaled_tiles.times_floats(sizes.kind, tile, words, groups, signed=signed)

    def supers(self, result: int, start: int) -> jax.Array:  # int32[64]
        """The words of supers of an input of the span."""
        length = self.spec.sizes.super_group
        return self.words(result, start // length * length, -1, -1)

    def byte(self, result: int, start: int, first: int) -> jax.Array:  # float32[64]
        """A factor of an input of the span, whose kind begins in the row ``first``."""
        return records.factor(*self.word(result, start, first), signed=self.spec.sizes.signed)

    def word(self, result: int, start: int, first: int) -> tuple[jax.Array, Any]:  # int32[64]
        """The words with this factor, and its byte in them."""
        group = self.spec.sizes.group
        word = FACTORS_OF_WORD * group
        if self.spec.config.span % word == 0:  # so the byte is known
            row, _ = divided(self.place_in_record(self.first_input)[1], FACTORS_OF_WORD)
            row, byte = row + start // word, start // group % FACTORS_OF_WORD
        else:
            _, number = self.place_in_record(self.first_input + start)
            row, byte = divided(number, FACTORS_OF_WORD)
        return self.words(result, start // word * word, first, first + row), byte

    def words(self, result: int, start: int, kind: int, row: Any) -> jax.Array:  # int32[64]
        """A row of words of factors, loaded once for all segments behind ``start`` that share it;
        ``kind`` tells rows for these segments apart.
        """
        ref = self.scratch.parts_smem.words
        if (place := (result, start, kind)) not in self.loaded:
            record, _ = self.place_in_record(self.first_input + start)
            row = ref.shape[3] - 1 if kind < 0 else row
            chosen = ref.at[self.stage, self.half(result), record, row]
            layout = plgpu.Layout.WGMMA.reduce(1)
            self.loaded[place] = plgpu.load(chosen, layout=layout, optimized=False)
        return self.loaded[place]

    def place_in_record(self, start: Any) -> tuple[Any, Any]:
        """The record in the stage with an input of the step, and the input's group in it."""
        sizes, block_k = self.spec.sizes, self.spec.config.block_k
        record, first = jnp.int32(0), start
        if block_k < sizes.super_group:
            _, first = divided(self.number * block_k + start, sizes.super_group)
        elif block_k > sizes.super_group:
            record, first = divided(start, sizes.super_group)
        return record, divided(first, sizes.group)[0]

    def tile_ref(self, half: Any, index: Any) -> Ref:
        """A tile of values of the stage, by its number among the tiles of inputs."""
        values, spec = self.scratch.values_smem, self.spec
        if not spec.sizes.super_group:
            return values.at[self.stage, half, index]
        record, tile = divided(index, spec.record_inputs // TILE)
        return values.at[self.stage, half, record, pl.ds(tile * spec.tile_rows, spec.tile_rows)]

    def tile(self, result: int, index: int, zero: jax.Array | float) -> jax.Array:
        """A tile's values minus ``zero`` as an operand, bfloat16[64, 64]."""
        place = lax.div(self.first_input, jnp.int32(TILE)) + index
        return operand(self.spec.sizes.kind, self.tile_ref(self.half(result), place), zero)

    def tokens(self, start: int) -> Ref:  # [chunk, block_t]
        """A chunk of the tokens' inputs."""
        columns = pl.ds(self.first_input + start, self.spec.chunk)
        return self.scratch.x_smem.at[self.stage, :, columns].transpose((1, 0))

    def weights(
        self, tiles: dict[tuple[int, int], Any], result: int, segment: int
    ) -> Iterator[tuple[jax.Array, Ref]]:
        """A segment's weights before they are scaled, and its tokens, in chunks.

        ``tiles`` are those in registers; a segment may be a part of one.
        """
        for start in self.chunks(segment):
            index, column = divmod(start, TILE)
            if self.spec.by_tile:
                yield self.recorded_tile(result, index), self.tokens(start)
                continue
            if self.spec.sizes.zeros:  # a tile may have several groups
                tile = self.tile(result, index, self.zero(result, segment))
            else:
                if (result, index) not in tiles:
                    tiles[result, index] = self.tile(result, index, self.zero(result, segment))
                tile = tiles[result, index]
            weights = tile[:, column : column + self.spec.chunk]
            if self.scales_weights and not self.are_powers:
                scale, offset = self.scale(result, segment)
                scale = lax.broadcast_in_dim(scale, weights.shape, [0])
                if offset is not None:
                    offset = lax.broadcast_in_dim(offset, weights.shape, [0])
                weights = fragments.scaled(weights, scale, offset)
            elif self.are_powers:
                scale, _ = self.scale(result, segment)
                scale = scale.astype(jnp.bfloat16)
                weights = weights * lax.broadcast_in_dim(scale, weights.shape, [0])
            yield weights, self.tokens(start)

    def zero(self, result: int, segment: int) -> jax.Array | float:  # float32[64]
        """The number to subtract from values."""
        sizes = self.spec.sizes
        if sizes.zeros:
            row = self.row(sizes.group, segment)
            return self.factor(self.scratch.parts_smem.zeros, result, row)
        if sizes.kind == "int8":
            return 128.0  # as they are stored
        return float(MIDDLE) if sizes.kind == "int4" and not sizes.offsets else 0.0

    def ones(self, segment: int) -> Iterator[tuple[jax.Array, Ref]]:
        """Ones as weights: their matmul sums up the inputs of each token."""
        ones = jnp.ones((TILE, self.spec.chunk), jnp.bfloat16)
        for start in self.chunks(segment):
            yield plgpu.layout_cast(ones, plgpu.Layout.WGMMA), self.tokens(start)

    def integer_offsets(
        self, result: int, segments: Iterable[int]
    ) -> Iterator[tuple[jax.Array, Ref]]:
        """The offsets of a super's groups, exact in bfloat16, as weights."""
        for segment in segments:
            offset = self.byte(result, segment * self.spec.segment, self.spec.small_rows)
            offset = offset.astype(jnp.bfloat16)
            for start in self.chunks(segment):
                yield lax.broadcast_in_dim(offset, (TILE, self.spec.chunk), [0]), self.tokens(start)

    def chunks(self, segment: int) -> range:
        """The first inputs of a segment's chunks."""
        length = self.spec.segment
        return range(segment * length, (segment + 1) * length, self.spec.chunk)

    def given(self, segment: int) -> jax.Array:  # float32[64, block_t]
        """The sums of the tokens' inputs of a segment, in each row."""
        row = self.row(self.spec.sizes.group, segment)
        ref = self.scratch.sums_given_smem.at[self.stage, row]
        sums = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(sums, (TILE, self.spec.config.block_t), [1])

    def add(self, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The results so far, float32[64, block_t] each, and this step's products."""
        spec = self.spec
        nested = spec.sizes.super_group > 0 and spec.sizes.offsets
        multiplied = spec.sizes.offsets and not spec.sums_given and not nested
        results, segments = range(spec.results), spec.config.span // spec.segment
        if self.scales_weights:
            tiles: dict[tuple[int, int], Any] = {}
            whole = [
                chain.from_iterable(map(partial(self.weights, tiles, result), range(segments)))
                for result in results
            ]
            return matmuls(whole, spec.config.block_t, totals)
        registers = (len(results) + multiplied) * spec.config.block_t // 2  # of a segment's sums
        batch = max(1, ACCUMULATOR_REGISTERS // registers)
        if nested:
            batch = min(batch, max(1, spec.sizes.super_group // spec.segment))
        for first in range(0, segments, batch):
            chosen = range(first, min(first + batch, segments))
            # Loaded before the matmuls' values: an arrival on a barrier does not wait for a load
            # right before it, which the next copy then overtook where the other warpgroup wrote
            # results (H100, prompts in int4 with groups of 128: scales of a later step).
            factors = [[self.scale(result, segment) for result in results] for segment in chosen]
            if nested:
                start = first * spec.segment
                minimum = [records.half(self.supers(result, start), 1) for result in results]
            if spec.sums_given:
                for segment, of_segment in zip(chosen, factors, strict=True):
                    offsets = [offset for _, offset in of_segment]
                    totals = _plus(totals, [self.given(segment)] * len(results), offsets)
            tiles = {}
            sums = []
            for segment in chosen:
                sums += [self.weights(tiles, result, segment) for result in results]
                sums += [self.ones(segment)] * multiplied
            if nested:
                sums += [self.integer_offsets(result, chosen) for result in results]
            found = iter(matmuls(sums, spec.config.block_t))
            for of_segment in factors:
                products = [next(found) for _ in results]
                totals = _plus(totals, products, [scale for scale, _ in of_segment])
                if multiplied:
                    inputs = [next(found)] * len(results)
                    totals = _plus(totals, inputs, [offset for _, offset in of_segment])
            if nested:
                totals = _plus(totals, [next(found) for _ in results], minimum)
        return totals


def accumulate(
    ring: Ring,
    num_steps: int,
    first_step: jax.Array,  # among all K steps of the CTA
    spec: Spec,
    step_at: Callable[[jax.Array, jax.Array], Step],  # of a K step and its stage
) -> Sequence[jax.Array]:  # float32[64, block_t] each
    """A warpgroup's results of a persistent CTA's tile."""

    def add(step: jax.Array, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        stage = ring.stage(first_step + step)
        k_step = step_at(step, stage)
        plgpu.barrier_wait(ring.barriers.at[stage])
        totals = k_step.add(totals)
        plgpu.barrier_arrive(ring.consumed_barriers.at[stage])
        return totals

    init = [zeros((TILE, spec.config.block_t)) for _ in range(spec.results)]
    return complete(spec, lax.fori_loop(0, num_steps, add, init))


def complete(spec: Spec, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The results of complete sums, which are divided by ``Spec.weight_unit``."""
    unit = spec.weight_unit
    return totals if unit == 1.0 else [total * unit for total in totals]


def share(totals: Sequence[jax.Array], at: Callable[[int], Ref], barrier: Ref) -> None:
    """Pass a warpgroup's results to another one, in shared memory."""
    for i, total in enumerate(totals):
        at(i)[...] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def sum_of_warpgroups(
    spec: Spec, totals: Sequence[jax.Array], at: Callable[[int, int], Ref]
) -> list[jax.Array]:  # for each half
    """The first warpgroup's results and those of the others, which are ``at`` other - 1, i."""
    results = dict(enumerate(totals))  # by half
    for other in range(1, spec.config.warpgroups):
        for i in range(spec.results):
            shared = plgpu.load(at(other - 1, i))
            half = other % 2 if spec.config.by_half else i
            results[half] = results[half] + shared if half in results else shared
    return list(results.values())


def divided(a: Any, b: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number that is not negative."""
    if isinstance(a, int):
        return divmod(a, b)
    if b & (b - 1):
        return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))
    return lax.shift_right_logical(a, jnp.int32(b.bit_length() - 1)), a & (b - 1)


def _plus(
    totals: Sequence[jax.Array],  # float32[64, block_t] each
    products: Sequence[jax.Array],  # of the same shapes
    factors: Sequence[jax.Array | None],  # float32[64] each, or a block's scalar
) -> list[jax.Array]:
    """The totals, and the products times the factors of their outputs."""
    added = []
    for total, product, factor in zip(totals, products, factors, strict=True):
        assert factor is not None
        if factor.ndim:
            factor = lax.broadcast_in_dim(factor, total.shape, [0])
        added.append(total + product * factor)
    return added


def write(
    spec: Spec,
    index: jax.Array,  # of the tile of outputs
    token: jax.Array,  # the first one
    results: Sequence[jax.Array],  # float32[64, block_t], one for each half
    out: Ref,  # [T, O]
) -> None:
    """Write the tile of the result from registers."""
    result = swiglu_of_many(*results) if spec.sizes.swiglu else results[0]
    columns, block_t = pl.ds(index * TILE, TILE), spec.config.block_t
    if spec.config.integers:
        places = [2 * i for i in range(spec.sizes.tokens)]
        return write_rows(out, spec.sizes.tokens, columns, result, places)
    if spec.sizes.tokens < MMA_TOKENS:
        return write_rows(out, spec.sizes.tokens, columns, result)
    if spec.sizes.tokens % block_t == 0:
        return write_columns(out, pl.ds(token, block_t), columns, result)
    result = transposed(result, out.dtype)
    for start in range(0, block_t, MMA_TOKENS):

        @pl.when(token + start < spec.sizes.tokens)
        def _some(start: int = start) -> None:
            tokens = pl.ds(token + start, MMA_TOKENS)
            some = result[:, start : start + MMA_TOKENS]
            out.at[tokens, columns].transpose((1, 0))[...] = some
