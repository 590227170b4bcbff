"""quantised_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

As in ``skinny_gemm`` the GEMM is transposed: M of a wgmma is 64 outputs, N are tokens, and a memory
warpgroup issues TMA copies many K steps ahead. The weights are operand A in registers: a compute
warpgroup loads packed values from shared memory, makes them bfloat16 without rounding, and
multiplies them. The products of a group of inputs are summed up by the tensor cores, then scaled in
float32 and added to the result. An offset of a group multiplies the sum of the tokens' inputs,
which is one more matmul, with ones. The compute warpgroups divide each K step and add up their
results at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised import MIDDLE
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.fragments import divisor, operand
from pallas_kernels.quantised_gemm.tiled.launch import (
    ACCUMULATOR_REGISTERS,
    MMA_TOKENS,
    TiledConfig,
    TiledSizes,
    choose_config,
    result_shape,
    sizes_of,
)

type Ref = Any

ROW_BYTES = 256  # of tiles in shared memory; a TMA copy has at most 256 elements in each dimension
TMA_ALIGNMENT = 128  # bytes, of a copy's target


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: TiledSizes
    config: TiledConfig

    @property
    def segment(self) -> int:
        """Inputs whose products are summed up before they are scaled."""
        return self.config.segment(self.sizes.group)

    @property
    def chunk(self) -> int:
        """Inputs of one wgmma call: a swizzled row of tokens."""
        return min(self.segment, TILE)

    @property
    def results(self) -> int:
        """Results of a compute warpgroup: 2 for gates and ups, else 1."""
        return 1 if self.config.by_half else self.sizes.halves


class _Parts(NamedTuple):
    """The factors of groups; None where the form has none."""

    scales: Ref
    zeros: Ref
    offsets: Ref
    supers: Ref


class _Gmem(NamedTuple):
    """Refs to the arrays in global memory; outputs are divided into halves and tiles."""

    x: Ref  # [T, K]
    values: Ref  # [halves, O / 64, K / 64, rows, ROW_BYTES]
    parts: _Parts  # [halves, O / 64, groups, 64] each
    out: Ref  # [T, O], or float32[S, T, O]


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    x_smem: Ref  # [stages, block_t, block_k]
    values_smem: Ref  # [stages, halves, tiles, rows, ROW_BYTES]
    parts_smem: _Parts  # [stages, padding, halves, groups, 64] each
    sums_smem: Ref  # float32[warpgroups - 1, results, 64, block_t]
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    sums_barrier: Ref  # one arrival per compute warpgroup but the first


class _CtaTile(NamedTuple):
    """Outputs, tokens and K range of a CTA; int32 scalars."""

    index: jax.Array  # of the tile of outputs
    token: jax.Array
    first_step: jax.Array  # counted from the start of the inner axis
    num_steps: jax.Array


def _cta_tile(spec: _Spec) -> _CtaTile:
    split, config = lax.axis_index("split"), spec.config
    steps = spec.sizes.inner // config.block_k
    first = lax.div(split * steps, jnp.int32(config.split_k))
    end = lax.div((split + 1) * steps, jnp.int32(config.split_k))
    token = lax.axis_index("tokens") * config.block_t
    return _CtaTile(lax.axis_index("tile"), token, first, end - first)


def _stage(spec: _Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


def _groups(spec: _Spec) -> _Parts:
    """Inputs that share a scale, a zero, an offset and a super."""
    sizes = spec.sizes
    return _Parts(
        sizes.group,
        sizes.group if sizes.zeros else 0,
        sizes.group if sizes.offsets else 0,
        sizes.super_group,
    )


def _memory_warpgroup(spec: _Spec, tile: _CtaTile, gmem: _Gmem, scratch: _Scratch) -> None:
    """Copy K steps as stages are consumed; the first weights before the previous kernel ends."""
    block_t, block_k = spec.config.block_t, spec.config.block_k

    def copy_weights(step: jax.Array) -> None:
        stage, barrier = _stage(spec, step), scratch.barriers.at[_stage(spec, step)]
        step = tile.first_step + step
        tiles = pl.ds(step * (block_k // TILE), block_k // TILE)
        values = gmem.values.at[:, tile.index, tiles]
        plgpu.copy_gmem_to_smem(values, scratch.values_smem.at[stage], barrier)
        for part, smem, group in zip(gmem.parts, scratch.parts_smem, _groups(spec), strict=True):
            if part is not None:
                count = smem.shape[3]
                first = lax.div(step * block_k, jnp.int32(group))  # group of the step
                row = first * (count // spec.config.rows(group))  # supers have one or two rows
                rows = part.at[:, tile.index, pl.ds(row, count)]
                plgpu.copy_gmem_to_smem(rows, smem.at[stage, 0], barrier)

    def copy_tokens(step: jax.Array) -> None:
        stage = _stage(spec, step)
        inner = pl.ds((tile.first_step + step) * block_k, block_k)
        tokens = gmem.x.at[pl.ds(tile.token, block_t), inner]  # TMA fills missing rows with zeros
        plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[stage], scratch.barriers.at[stage])

    prologue = jnp.minimum(tile.num_steps, spec.config.stages)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _copy() -> None:
            pl.loop(0, prologue)(copy_weights)
            grid_dependency_wait()
            pl.loop(0, prologue)(copy_tokens)

            @pl.loop(prologue, tile.num_steps)
            def _step(step: jax.Array) -> None:
                plgpu.barrier_wait(scratch.consumed_barriers.at[_stage(spec, step)])
                copy_weights(step)
                copy_tokens(step)


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _matmuls(
    sums: Sequence[Iterable[tuple[jax.Array, Ref]]],  # bfloat16[64, inputs], [inputs, tokens]
    tokens: int,
) -> list[jax.Array]:  # float32[64, tokens] each
    """The sums of matmuls. JAX's interpreter has no wgmma with an operand in registers."""

    def multiply(accs: list[Ref]) -> list[jax.Array]:
        for acc, operands in zip(accs, sums, strict=True):
            for a, x in operands:
                plgpu.wgmma(acc, a, x)
        return [acc[...] for acc in accs]

    acc = plgpu.WGMMAAccumulatorRef((TILE, tokens), jnp.float32)
    return pl.run_scoped(multiply, [acc] * len(sums))


@dataclass(frozen=True)
class _Step:
    """A compute warpgroup's inputs of a K step."""

    spec: _Spec
    stage: jax.Array
    warpgroup: jax.Array
    scratch: _Scratch

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

    def factor(self, part: Ref, result: int, row: jax.Array | int) -> jax.Array:  # float32[64]
        """A row of factors of the tile's outputs."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        row = part.at[self.stage, 0, self.half(result), row]
        return plgpu.load(row, layout=layout, optimized=False).astype(jnp.float32)

    def row(self, group: int, segment: int) -> jax.Array:
        """Of the factors of groups, the row of a segment."""
        spec = self.spec
        if group >= spec.config.block_k:
            return jnp.int32(0)
        start = self.first_input + segment * spec.segment
        return lax.div(start, jnp.int32(group))

    def scale(self, result: int, segment: int) -> tuple[jax.Array, jax.Array | None]:
        """Scale and offset of a segment, float32[64] each."""
        sizes, parts = self.spec.sizes, self.scratch.parts_smem
        row = self.row(sizes.group, segment)
        scale = self.factor(parts.scales, result, row)
        offset = self.factor(parts.offsets, result, row) if sizes.offsets else None
        if sizes.super_group:
            count = 1 + sizes.offsets  # of supers in a group
            row = self.row(sizes.super_group, segment) * count
            scale *= self.factor(parts.supers, result, row)
            if offset is not None:
                offset *= self.factor(parts.supers, result, row + 1)
        return scale * divisor(sizes.kind), offset

    def tile(self, result: int, index: int, zero: jax.Array | float) -> jax.Array:
        """A tile's values minus ``zero`` as an operand, bfloat16[64, 64]."""
        place = self.half(result), lax.div(self.first_input, jnp.int32(TILE)) + index
        ref = self.scratch.values_smem.at[self.stage, *place]
        return operand(self.spec.sizes.kind, ref, zero)

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
            if self.spec.sizes.zeros:  # a tile may have several groups
                tile = self.tile(result, index, self.zero(result, segment))
            else:
                if (result, index) not in tiles:
                    tiles[result, index] = self.tile(result, index, self.zero(result, segment))
                tile = tiles[result, index]
            yield tile[:, column : column + self.spec.chunk], self.tokens(start)

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

    def chunks(self, segment: int) -> range:
        """The first inputs of a segment's chunks."""
        length = self.spec.segment
        return range(segment * length, (segment + 1) * length, self.spec.chunk)

    def add(self, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """The results so far, float32[64, block_t] each, and this step's products."""
        spec, offsets = self.spec, self.spec.sizes.offsets
        results, segments = range(spec.results), spec.config.span // spec.segment
        registers = (len(results) + offsets) * spec.config.block_t // 2  # of a segment's sums
        batch = max(1, ACCUMULATOR_REGISTERS // registers)
        for first in range(0, segments, batch):
            chosen = range(first, min(first + batch, segments))
            tiles: dict[tuple[int, int], Any] = {}
            sums = []
            for segment in chosen:
                sums += [self.weights(tiles, result, segment) for result in results]
                sums += [self.ones(segment)] * offsets
            found = iter(_matmuls(sums, spec.config.block_t))
            for segment in chosen:
                products = [next(found) for _ in results]
                inputs = next(found) if offsets else None
                totals = self.scaled(totals, segment, products, inputs)
        return totals

    def scaled(
        self,
        totals: Sequence[jax.Array],  # float32[64, block_t] each
        segment: int,
        products: Sequence[jax.Array],  # of the same shapes
        inputs: jax.Array | None,  # float32[64, block_t]: sums of tokens, in each row
    ) -> Sequence[jax.Array]:
        """Add a segment's products."""
        added = []
        for result, (total, product) in enumerate(zip(totals, products, strict=True)):
            scale, offset = self.scale(result, segment)
            new = total + product * lax.broadcast_in_dim(scale, total.shape, [0])
            if offset is not None and inputs is not None:
                new += inputs * lax.broadcast_in_dim(offset, total.shape, [0])
            added.append(new)
        return added


def _accumulate(
    spec: _Spec, tile: _CtaTile, warpgroup: jax.Array, scratch: _Scratch
) -> Sequence[jax.Array]:  # float32[64, block_t] each
    """A warpgroup's part of the result."""

    def add(step: jax.Array, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        stage = _stage(spec, step)
        plgpu.barrier_wait(scratch.barriers.at[stage])
        totals = _Step(spec, stage, warpgroup, scratch).add(totals)

        # The stages of the last steps are not reused, so no copy waits for their release.
        @pl.when(step + spec.config.stages < tile.num_steps)
        def _release() -> None:
            plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])

        return totals

    shape = (TILE, spec.config.block_t)
    init = [_zeros(shape) for _ in range(spec.results)]
    return lax.fori_loop(0, tile.num_steps, add, init)


def _write(
    spec: _Spec,
    tile: _CtaTile,
    results: Sequence[jax.Array],  # float32[64, block_t], one for each half
    out: Ref,  # [T, O]
) -> None:
    """Write the tile of the result from registers."""
    result = results[0]
    if spec.sizes.swiglu:
        # The square of a reciprocal root is cheaper than a division.
        root = lax.rsqrt(1.0 + jnp.exp(-result))
        result = result * results[1] * root * root
    columns = pl.ds(tile.index * TILE, TILE)
    if spec.sizes.tokens < MMA_TOKENS:
        index = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
        for i in range(spec.sizes.tokens):
            row = jnp.where(index == i, result, 0.0).sum(axis=1)
            out.at[i, columns][...] = row.astype(out.dtype)
        return
    # A register holds two adjacent outputs of a token instead of two tokens.
    result = plgpu.layout_cast(result.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    if spec.sizes.tokens % spec.config.block_t == 0:
        tokens = pl.ds(tile.token, spec.config.block_t)
        out.at[tokens, columns].transpose((1, 0))[...] = result
        return
    for start in range(0, spec.config.block_t, MMA_TOKENS):

        @pl.when(tile.token + start < spec.sizes.tokens)
        def _some(start: int = start) -> None:
            tokens = pl.ds(tile.token + start, MMA_TOKENS)
            some = result[:, start : start + MMA_TOKENS]
            out.at[tokens, columns].transpose((1, 0))[...] = some


def _compute_warpgroup(
    spec: _Spec, tile: _CtaTile, warpgroup: jax.Array, out: Ref, scratch: _Scratch
) -> None:
    """Multiply, and add up the results of the warpgroups; the first one writes the sum."""
    totals = _accumulate(spec, tile, warpgroup, scratch)
    if spec.config.warpgroups == 1:
        _write(spec, tile, totals, out)
        return

    @pl.when(warpgroup > 0)
    def _share() -> None:
        for i, total in enumerate(totals):
            scratch.sums_smem.at[warpgroup - 1, i][...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.sums_barrier)

    @pl.when(warpgroup == 0)
    def _sum() -> None:
        plgpu.barrier_wait(scratch.sums_barrier)
        results = dict(enumerate(totals))  # by half
        for other in range(1, spec.config.warpgroups):
            for i in range(spec.results):
                shared = plgpu.load(scratch.sums_smem.at[other - 1, i])
                half = other % 2 if spec.config.by_half else i
                results[half] = results[half] + shared if half in results else shared
        _write(spec, tile, list(results.values()), out)


def _kernel(spec: _Spec, gmem: _Gmem, scratch: _Scratch) -> None:
    launch_dependents()
    tile, warpgroup = _cta_tile(spec), lax.axis_index("warpgroup")

    @pl.when(warpgroup == spec.config.warpgroups)
    def _memory() -> None:
        _memory_warpgroup(spec, tile, gmem, scratch)

    @pl.when(warpgroup < spec.config.warpgroups)
    def _compute() -> None:
        out = gmem.out if spec.config.split_k == 1 else gmem.out.at[lax.axis_index("split")]
        _compute_warpgroup(spec, tile, warpgroup, out, scratch)


def _swizzled(columns: int, itemsize: int) -> Any:
    """Transforms of a matrix whose tiles have this many columns."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, columns)), swizzle(columns * itemsize)


def _scratch_types(spec: _Spec, parts: _Parts) -> _Scratch:
    """``parts`` are the arrays of factors, [halves, O / 64, groups, 64] each."""
    config, sizes = spec.config, spec.sizes
    stages, halves, block_t = config.stages, sizes.halves, config.block_t

    def part_type(part: jax.Array | None, group: int) -> Any:
        if part is None:
            return None
        rows = config.rows(group) * part.shape[2] * group // sizes.inner
        padding = max(1, TMA_ALIGNMENT // (halves * rows * TILE * part.dtype.itemsize))
        return plgpu.SMEM((stages, padding, halves, rows, TILE), part.dtype)

    values = (stages, halves, config.block_k // TILE, sizes.tile_bytes // ROW_BYTES, ROW_BYTES)
    columns = next(size for size in (32, 16, 8) if block_t % size == 0)
    return _Scratch(
        x_smem=plgpu.SMEM(
            (stages, block_t, config.block_k), jnp.bfloat16, transforms=_swizzled(spec.chunk, 2)
        ),
        values_smem=plgpu.SMEM(values, jnp.uint8),
        parts_smem=_Parts(*map(part_type, parts, _groups(spec))),
        sums_smem=plgpu.SMEM(
            (max(1, config.warpgroups - 1), spec.results, TILE, block_t),
            jnp.float32,
            transforms=_swizzled(columns, 4),
        ),
        barriers=plgpu.Barrier(
            num_arrivals=2 + sum(part is not None for part in parts), num_barriers=stages
        ),
        consumed_barriers=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        sums_barrier=plgpu.Barrier(num_arrivals=max(1, config.warpgroups - 1)),
    )


@partial(jax.jit, static_argnames=("kind", "swiglu", "split"))  # one trace for all layers
def quantised_gemm(
    x: jax.Array,  # [T, K]
    values: jax.Array,  # [O, K] or uint8[O, K / 2]; with swiglu [2 * O, ...]: gate, up
    scales: jax.Array,  # [O, G]
    zeros: jax.Array | None,  # uint8[O, G]
    offsets: jax.Array | None,  # [O, G]
    supers: jax.Array | None,  # [O, S, 1 or 2]
    *,
    kind: str,
    swiglu: bool,
    split: bool,
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``quantised_gemm.api``; the weights are arranged (``tiled.arrange``)."""
    args = (x, values, scales, zeros, offsets, supers)
    static: Any = {"kind": kind, "swiglu": swiglu, "split": split}
    return launch_with(*args, config=choose_config(sizes_of(*args, **static)), **static)


def launch_with(
    x: jax.Array,  # [T, K]
    values: jax.Array,  # [O, K] or uint8[O, K / 2]; with swiglu [2 * O, ...]: gate, up
    scales: jax.Array,  # [O, G]
    zeros: jax.Array | None,  # uint8[O, G]
    offsets: jax.Array | None,  # [O, G]
    supers: jax.Array | None,  # [O, S, 1 or 2]
    *,
    config: TiledConfig,
    kind: str,
    swiglu: bool,
    split: bool,
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """``quantised_gemm`` with a given configuration.

    Raises ValueError when the configuration does not fit the call.
    """
    factors = (scales, zeros, offsets, supers)
    sizes = sizes_of(x, values, *factors, kind=kind, swiglu=swiglu, split=split)
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = _Spec(sizes, config)
    outer = (sizes.halves, sizes.outer // TILE)
    tiles = values.reshape(*outer, sizes.inner // TILE, sizes.tile_bytes // ROW_BYTES, ROW_BYTES)
    parts = _Parts(*(x if x is None else x.reshape(*outer, -1, TILE) for x in factors))
    present = [part for part in parts if part is not None]

    def body(x: Ref, tiles: Ref, *refs: Ref) -> None:
        *rest, out, scratch = refs
        found = iter(rest)
        named = _Parts(*(None if part is None else next(found) for part in parts))
        _kernel(spec, _Gmem(x, tiles, named, out), scratch)

    return plgpu.kernel(
        body,
        out_type=result_shape(config, sizes),
        scratch_types=(_scratch_types(spec, parts),),
        grid=(config.split_k, -(-sizes.tokens // config.block_t), sizes.outer // TILE),
        grid_names=("split", "tokens", "tile"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="quantised_gemm",
    )(x, tiles, *present)
