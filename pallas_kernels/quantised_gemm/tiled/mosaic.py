"""quantised_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

As in ``skinny_gemm`` the GEMM is transposed: M of a wgmma is 64 outputs, N are tokens, and a memory
warpgroup issues TMA copies many K steps ahead. The weights are operand A in registers: a compute
warpgroup loads packed values from shared memory, makes them bfloat16 without rounding, and
multiplies them. The products of a group of inputs are summed up by the tensor cores, then scaled in
float32 and added to the result. An offset of a group multiplies the sum of the tokens' inputs,
which is one more matmul, with ones. The compute warpgroups divide each K step and add up their
results at the end.

``norm_gemm`` is the same for one token, with the residual add and the norm before it, as in
``norm_gemm.mosaic``: each CTA computes them itself while its first weights are in flight, and the
compute warpgroups divide the token. The normed token, for all K steps, is then in the first rows of
swizzled tiles [8, chunk].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.epilogues import load_bias, plus_bias
from pallas_kernels.gemm.pipeline import Ring, in_one_warp, launch
from pallas_kernels.gemm.scratch import smem
from pallas_kernels.gemm.tiles import split_range
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.copies import copy_weights
from pallas_kernels.quantised_gemm.tiled.integers import (
    COLUMNS,
    Factors,
    RecordedFactors,
    multiply,
    put,
    whole_numbers,
)
from pallas_kernels.quantised_gemm.tiled.launch import (
    INTEGER_TOKENS,
    TiledConfig,
    choose_config,
    result_shape,
    sizes_of,
)
from pallas_kernels.quantised_gemm.tiled.scratch import TiledScratch, scratch_types
from pallas_kernels.quantised_gemm.tiled.step import (
    FACTORS_OF_WORD,
    Gmem,
    Ref,
    Spec,
    Step,
    complete,
    divided,
    gmem_views,
    share,
    sum_of_warpgroups,
    write,
    zeros,
)
from pallas_kernels.residual_norm import token
from pallas_kernels.skinny_gemm.ref import swiglu

LOADS_IN_FLIGHT = 6  # of a thread that rounds tokens, 8 bytes each; more take more registers


class _CtaTile(NamedTuple):
    """Outputs, tokens and K range of a CTA; int32 scalars."""

    index: jax.Array  # of the tile of outputs
    token: jax.Array
    first_step: jax.Array  # counted from the start of the inner axis
    num_steps: jax.Array


def _cta_tile(spec: Spec) -> _CtaTile:
    config = spec.config
    first, end = split_range(spec.sizes.inner // config.block_k, config.split_k)
    token = lax.axis_index("tokens") * config.block_t
    return _CtaTile(lax.axis_index("tile"), token, first, end - first)


@dataclass(frozen=True)
class _Copies:
    """TMA copies of a CTA's K steps, issued by one warp."""

    spec: Spec
    tile: _CtaTile
    gmem: Gmem
    ring: Ring
    scratch: TiledScratch

    @property
    def copies_tokens(self) -> bool:
        """False where the compute warpgroups write the tokens to shared memory."""
        return self.spec.norm is None and not self.spec.config.integers

    def weights(self, step: jax.Array) -> None:
        """Issue the copies of a step's weights."""
        where, stage = (slice(None), self.tile.index), self.ring.stage(step)
        step = self.tile.first_step + step
        copy_weights(self.spec, self.gmem, self.scratch, where, step, stage)

    def tokens(self, step: jax.Array) -> None:
        """Issue the copy of a step's tokens. TMA fills missing rows with zeros."""
        config, stage = self.spec.config, self.ring.stage(step)
        inner = pl.ds((self.tile.first_step + step) * config.block_k, config.block_k)
        tokens = self.gmem.x.at[pl.ds(self.tile.token, config.block_t), inner]
        x_smem, barrier = self.scratch.x_smem.at[stage], self.scratch.barriers.at[stage]
        plgpu.copy_gmem_to_smem(tokens, x_smem, barrier)

    def first(self) -> None:
        """Issue the copies of as many steps as there are stages, of weights before the previous
        kernel ends.
        """
        count = jnp.minimum(self.tile.num_steps, self.spec.config.stages)
        pl.loop(0, count)(self.weights)
        if self.copies_tokens:
            grid_dependency_wait()
            pl.loop(0, count)(self.tokens)

    def next(self, step: jax.Array) -> None:
        """Issue a further step's copies when its stage has been consumed."""
        self.ring.wait_consumed(step)
        self.weights(step)
        if self.copies_tokens:
            self.tokens(step)

    def all(self) -> None:
        """Issue all copies."""
        self.first()
        stages = self.spec.config.stages
        pl.loop(jnp.minimum(self.tile.num_steps, stages), self.tile.num_steps)(self.next)


@dataclass(frozen=True)
class _IntegerStep(Step):
    """A K step of tokens as integers, all of which are in shared memory."""

    step: jax.Array = field(kw_only=True)

    def add(self, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """See ``Step``."""
        span, length = self.spec.config.span, self.spec.config.span
        if self.spec.sizes.super_group:
            length = min(span, self.spec.sizes.super_group)
        found = list(totals)
        for result in range(self.spec.results):
            for start in range(0, span, length):
                found[result] = self._plus(found[result], result, start, length)
        return found

    def _plus(self, total: jax.Array, result: int, start: int, length: int) -> jax.Array:
        """The total plus the products of ``length`` inputs from ``start`` on."""
        sizes, parts, chunk = self.spec.sizes, self.scratch.parts_smem, self.spec.chunk
        half, first = self.half(result), self.first_input + start

        def row(group: int, input: Any) -> jax.Array | int:
            return 0 if group >= self.spec.config.block_k else lax.div(input, jnp.int32(group))

        def at(part: Ref, index: Any) -> Ref:
            return None if part is None else part.at[self.stage, 0, half, index]

        tile = lax.div(first, jnp.int32(TILE))
        tiles = [self.tile_ref(half, tile + i) for i in range(length // TILE)]
        if sizes.super_group:
            factors: Any = self._recorded_factors(half, first, length)
        else:
            rows = [row(sizes.group, first + i) for i in range(0, length, sizes.group)]
            factors = [
                Factors(at(parts.scales, r), at(parts.zeros, r), at(parts.offsets, r)) for r in rows
            ]
        place = lax.div(self.step * self.spec.config.block_k + first, jnp.int32(chunk))
        chunks, each = pl.ds(place, length // chunk), self.spec.unit // chunk
        units = pl.ds(lax.div(place, jnp.int32(each)), length // self.spec.unit)
        tokens = self.scratch.bytes_smem.at[chunks]
        factors_of_units = self.scratch.units_smem.at[:, units]
        totals = self.scratch.totals_smem.at[:, chunks]
        return multiply(sizes.kind, tiles, factors, tokens, factors_of_units, totals, total)

    def _recorded_factors(self, half: Any, first: jax.Array, length: int) -> RecordedFactors:
        """The factors of ``length`` inputs from ``first`` on, all of one record."""
        sizes, words = self.spec.sizes, self.scratch.parts_smem.words
        record, group = self.place_in_record(first)
        count, rows = length // sizes.group, self.spec.small_rows
        row, skipped = divided(group, FACTORS_OF_WORD)
        if count % FACTORS_OF_WORD == 0 or count == sizes.super_group // sizes.group:
            skipped = None

        def at(index: Any) -> Ref:
            return words.at[self.stage, half, record, index]

        kinds = range(0, (1 + sizes.offsets) * rows, rows)
        small = [
            [at(start + row + i) for i in range(-(-count // FACTORS_OF_WORD))] for start in kinds
        ]
        last = words.shape[3] - 1
        return RecordedFactors(
            count, sizes.signed, small[0], small[1] if sizes.offsets else (), at(last), skipped
        )


@dataclass(frozen=True)
class _NormedStep(Step):
    """A K step of a normed token, all of which is in shared memory."""

    step: jax.Array = field(kw_only=True)

    def tokens(self, start: int) -> Ref:  # [chunk, 8]
        first = self.step * self.spec.config.block_k + self.first_input + start
        _, swizzled_smem = token.views(self.scratch.x_smem)
        return swizzled_smem.at[lax.div(first, jnp.int32(self.spec.chunk))].transpose((1, 0))


def _write_normed(
    spec: Spec,
    norm: token.Norm,
    warpgroup: jax.Array,
    first: jax.Array,
    gmem: Gmem,
    scratch: TiledScratch,
) -> None:
    """Add and normalise the token with the other compute warpgroups; the ``first`` CTA also writes
    the sum.
    """
    plain, _ = token.views(scratch.x_smem)
    count = spec.config.warpgroups
    share = token.Share(warpgroup, count, scratch.squares_smem, scratch.squares_barrier)
    found = token.normed_token(norm, gmem.x, share)
    for span, normed in zip(found.spans, found.normed, strict=True):
        plain[span, 0, :] = normed
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.normed_barrier)
    pl.when(first)(partial(token.write_total, found, gmem.total))
    plgpu.barrier_wait(scratch.normed_barrier)


def _write_integers(
    spec: Spec, warpgroup: jax.Array, tile: _CtaTile, gmem: Gmem, scratch: TiledScratch
) -> None:
    """Write the CTA's inputs of all tokens as integers, with the other compute warpgroups, each
    every ``warpgroups``-th span. With a norm the token is added and normalised before, and the
    first CTA writes the sum.
    """
    count, each = spec.config.warpgroups, spec.unit // spec.chunk

    def write(of_token: int, span: Any, inputs: jax.Array) -> None:
        whole, unit = whole_numbers(inputs)
        chunks = pl.ds(span.start * each, span.size * each)
        put(
            whole, scratch.bytes_smem.at[chunks], scratch.totals_smem.at[of_token, chunks], of_token
        )
        scratch.units_smem.at[of_token, span][...] = unit

    found = None
    if spec.norm is not None:
        share = token.Share(warpgroup, count, scratch.squares_smem, scratch.squares_barrier)
        found = token.normed_token(spec.norm, gmem.x, share)
        for span, inputs in zip(found.spans, found.normed, strict=True):
            write(0, span, inputs)
    else:
        grid_dependency_wait()
        places = _spans(spec, warpgroup, tile, scratch)
        for batch in range(0, len(places), LOADS_IN_FLIGHT):
            loaded = []
            for of_token, span, source in places[batch : batch + LOADS_IN_FLIGHT]:
                x, layout = gmem.x.at[of_token, source], token.span_layout(spec.unit)
                loaded.append((of_token, span, plgpu.load(x, layout=layout, optimized=False)))
            for one in loaded:
                write(*one)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.normed_barrier)
    if found is not None:
        pl.when(tile.index == 0)(partial(token.write_total, found, gmem.total))
    plgpu.barrier_wait(scratch.normed_barrier)


def _spans(
    spec: Spec, warpgroup: jax.Array, tile: _CtaTile, scratch: TiledScratch
) -> list[tuple[int, Any, Any]]:
    """The warpgroup's spans of the CTA's inputs: token, place among the CTA's units, and among all.
    The last spans may overlap; all write the same.
    """
    count, rows = spec.config.warpgroups, token.SPAN // spec.unit
    per_step = spec.config.block_k // spec.unit
    first, units = tile.first_step * per_step, tile.num_steps * per_step
    places = []
    for of_token in range(spec.sizes.tokens):
        for i in range(0, -(-scratch.units_smem.shape[1] // rows), count):
            start = jnp.minimum((i + warpgroup) * rows, units - rows)
            places.append((of_token, pl.ds(start, rows), pl.ds(first + start, rows)))
    return places


def _accumulate(
    spec: Spec, warpgroup: jax.Array, copies: _Copies
) -> Sequence[jax.Array]:  # float32[64, block_t] each
    """A warpgroup's part of the result."""
    tile, ring, stages = copies.tile, copies.ring, spec.config.stages

    def add(step: jax.Array, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        stage = ring.stage(step)
        if spec.config.own_copies:
            further = step - 1 + stages  # in the stage of the previous step

            @pl.when((warpgroup == 0) & (step > 0) & (further < tile.num_steps))
            def _copy() -> None:
                in_one_warp(lambda: copies.next(further))

        plgpu.barrier_wait(ring.barriers.at[stage])
        given = (spec, stage, warpgroup, copies.scratch, tile.first_step + step)
        inputs = Step(*given)
        if spec.config.integers:
            inputs = _IntegerStep(*given, step=step)
        elif spec.norm is not None:
            inputs = _NormedStep(*given, step=step)
        totals = inputs.add(totals)
        ring.release_if_reused(stage, step, tile.num_steps)
        return totals

    shape = (TILE, spec.config.block_t)
    init = [zeros(shape) for _ in range(spec.results)]
    return complete(spec, lax.fori_loop(0, tile.num_steps, add, init))


def _compute_warpgroup(spec: Spec, warpgroup: jax.Array, out: Ref, copies: _Copies) -> None:
    """Multiply, and add up the results of the warpgroups; the first one writes the sum."""
    tile, scratch = copies.tile, copies.scratch
    bias = load_bias(copies.gmem.bias, pl.ds(tile.index * TILE, TILE))
    totals = _accumulate(spec, warpgroup, copies)

    def finish(results: Sequence[jax.Array]) -> None:
        results = [plus_bias(result, bias) for result in results]
        write(spec, tile.index, tile.token, results, out)

    if spec.config.warpgroups == 1:
        finish(totals)
        return

    shared_smem, barrier = scratch.shared_smem, scratch.shared_barriers

    @pl.when(warpgroup > 0)
    def _share() -> None:
        share(totals, lambda i: shared_smem.at[warpgroup - 1, i], barrier)

    @pl.when(warpgroup == 0)
    def _sum() -> None:
        plgpu.barrier_wait(barrier)
        results = sum_of_warpgroups(spec, totals, lambda other, i: shared_smem.at[other, i])
        finish(results)


def _kernel(spec: Spec, gmem: Gmem, results: tuple[Ref, Ref], scratch: TiledScratch) -> None:
    total, result = results
    gmem = gmem._replace(total=total)
    launch_dependents()
    tile, warpgroup = _cta_tile(spec), lax.axis_index("warpgroup")
    ring = Ring(spec.config.stages, scratch.barriers, scratch.consumed_barriers)
    copies = _Copies(spec, tile, gmem, ring, scratch)
    if spec.config.own_copies:
        pl.when(warpgroup == 0)(lambda: in_one_warp(copies.first))
    else:
        pl.when(warpgroup == spec.config.warpgroups)(lambda: in_one_warp(copies.all))

    @pl.when(warpgroup < spec.config.warpgroups)
    def _compute() -> None:
        if spec.config.integers:
            _write_integers(spec, warpgroup, tile, gmem, scratch)
        elif spec.norm is not None:
            _write_normed(spec, spec.norm, warpgroup, tile.index == 0, gmem, scratch)
        out = result if spec.config.split_k == 1 else result.at[lax.axis_index("split")]
        _compute_warpgroup(spec, warpgroup, out, copies)


def _scratch_types(spec: Spec, gmem: Gmem) -> TiledScratch:
    config, sizes, count = spec.config, spec.sizes, spec.config.warpgroups
    others, normed = max(1, count - 1), dict[str, Any]()
    if config.integers:
        steps = -(-(sizes.inner // config.block_k) // config.split_k)
        chunks = steps * config.block_k // spec.chunk
        normed = {
            "x_smem": None,
            "bytes_smem": plgpu.SMEM((chunks, COLUMNS, 4, spec.chunk // 4), jnp.int8),
            "units_smem": plgpu.SMEM(
                (INTEGER_TOKENS, chunks * spec.chunk // spec.unit), jnp.float32
            ),
            "totals_smem": plgpu.SMEM((INTEGER_TOKENS, chunks), jnp.int32),
            "squares_smem": plgpu.SMEM((count, token.SPAN // spec.unit), jnp.float32),
            "squares_barrier": plgpu.Barrier(num_arrivals=count),
            "normed_barrier": plgpu.Barrier(num_arrivals=count),
        }
    elif sizes.normed:
        tokens = (sizes.inner // spec.chunk, config.block_t, spec.chunk)
        swizzled = smem(tokens, jnp.bfloat16, spec.chunk)
        normed = {
            "x_smem": token.ref_union(plgpu.SMEM(tokens, jnp.bfloat16), swizzled),
            "squares_smem": plgpu.SMEM((count, token.SPAN // spec.chunk), jnp.float32),
            "squares_barrier": plgpu.Barrier(num_arrivals=count),
            "normed_barrier": plgpu.Barrier(num_arrivals=count),
        }
    return scratch_types(
        spec,
        gmem,
        tiles=sizes.halves,
        shared=(others, spec.results, TILE, config.block_t),
        shared_barriers=plgpu.Barrier(num_arrivals=others),
        warpgroups=count,
        **normed,
    )


def _launch(spec: Spec, gmem: Gmem, total_type: jax.ShapeDtypeStruct | None = None) -> Any:
    """Run the kernel; returns the sum of a normed token, or None, and the result."""
    sizes, config = spec.sizes, spec.config
    return launch(
        "quantised_gemm" if spec.norm is None else "norm_quantised_gemm",
        partial(_kernel, spec),
        gmem,
        out_type=(total_type, result_shape(config, sizes)),
        scratch=_scratch_types(spec, gmem),
        grid={
            "split": config.split_k,
            "tokens": -(-sizes.tokens // config.block_t),
            "tile": sizes.outer // TILE,
        },
        warpgroups=config.warpgroups + (not config.own_copies),
        auto_barriers=spec.norm is None and not config.integers,
    )


@jax.jit  # one trace for all layers
def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``quantised_gemm.api``; the weights are arranged (``tiled.arrange``)."""
    sizes = sizes_of(args)
    if sizes.is_narrow:
        found = quantised_gemm(replace(args, swiglu=False, split=True, wide=True))
        return swiglu(found if found.ndim == 2 else found.sum(axis=0)).astype(args.x.dtype)
    return launch_with(choose_config(sizes), args)


def launch_with(
    config: TiledConfig, args: QuantisedGemmArgs
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """``quantised_gemm`` with a given configuration.

    Raises ValueError when the configuration does not fit the call.
    """
    sizes = sizes_of(args)
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec, x = Spec(sizes, config), args.x
    if config.integers:
        x = x.reshape(sizes.tokens, -1, spec.unit)
    _, out = _launch(spec, Gmem(x, *gmem_views(sizes, args.w), bias=args.bias))
    return out


@jax.jit  # one trace for all layers
def norm_gemm(args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:  # [1, K], [1, O]
    """See ``norm_gemm.api``; the weights are arranged (``tiled.arrange``)."""
    return launch_normed(choose_config(sizes_of(args.gemm(args.norm.x), normed=True)), args)


def launch_normed(config: TiledConfig, args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:
    """``norm_gemm`` with a given configuration; tests call it too."""
    gemm, norm = args.gemm(args.norm.x), args.norm
    sizes = sizes_of(gemm, normed=True)
    spec = Spec(sizes, config, norm=token.Norm(norm.row, norm.eps))
    views = gmem_views(sizes, gemm.w)
    arrays, total_type = token.norm_arrays(norm, spec.unit)
    total, out = _launch(spec, Gmem(arrays, *views, bias=args.bias), total_type)
    return total.reshape(norm.x.shape), out
