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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.launch import (
    TiledConfig,
    choose_config,
    result_shape,
    sizes_of,
)
from pallas_kernels.quantised_gemm.tiled.step import (
    Gmem,
    Parts,
    Ref,
    Spec,
    Step,
    copy_weights,
    gmem_views,
    swizzled,
    weight_types,
    write,
    zeros,
)
from pallas_kernels.residual_norm import token


class _Scratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation."""

    x_smem: Ref  # [stages, block_t, block_k]; with a norm [chunks, 8, chunk], see ``token.views``
    values_smem: Ref  # [stages, halves, tiles, rows, ROW_BYTES]
    parts_smem: Parts  # [stages, padding, halves, groups, 64] each
    sums_smem: Ref  # float32[warpgroups - 1, results, 64, block_t]
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup
    sums_barrier: Ref  # one arrival per compute warpgroup but the first
    squares_smem: Ref = None  # of a norm, see ``token.Share``
    squares_barrier: Ref = None  # one arrival per compute warpgroup
    normed_barrier: Ref = None  # one arrival per compute warpgroup


class _CtaTile(NamedTuple):
    """Outputs, tokens and K range of a CTA; int32 scalars."""

    index: jax.Array  # of the tile of outputs
    token: jax.Array
    first_step: jax.Array  # counted from the start of the inner axis
    num_steps: jax.Array


def _cta_tile(spec: Spec) -> _CtaTile:
    split, config = lax.axis_index("split"), spec.config
    steps = spec.sizes.inner // config.block_k
    first = lax.div(split * steps, jnp.int32(config.split_k))
    end = lax.div((split + 1) * steps, jnp.int32(config.split_k))
    token = lax.axis_index("tokens") * config.block_t
    return _CtaTile(lax.axis_index("tile"), token, first, end - first)


def _stage(spec: Spec, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(spec.config.stages))


@dataclass(frozen=True)
class _Copies:
    """TMA copies of a CTA's K steps, issued by one warp."""

    spec: Spec
    tile: _CtaTile
    gmem: Gmem
    scratch: _Scratch

    def weights(self, step: jax.Array) -> None:
        """Issue the copies of a step's weights."""
        where, stage = (slice(None), self.tile.index), _stage(self.spec, step)
        step = self.tile.first_step + step
        copy_weights(self.spec, self.gmem, self.scratch, where, step, stage)

    def tokens(self, step: jax.Array) -> None:
        """Issue the copy of a step's tokens. TMA fills missing rows with zeros."""
        config, stage = self.spec.config, _stage(self.spec, step)
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
        if self.spec.norm is None:
            grid_dependency_wait()
            pl.loop(0, count)(self.tokens)

    def next(self, step: jax.Array) -> None:
        """Issue a further step's copies when its stage has been consumed."""
        plgpu.barrier_wait(self.scratch.consumed_barriers.at[_stage(self.spec, step)])
        self.weights(step)
        if self.spec.norm is None:
            self.tokens(step)

    def all(self) -> None:
        """Issue all copies."""
        self.first()
        stages = self.spec.config.stages
        pl.loop(jnp.minimum(self.tile.num_steps, stages), self.tile.num_steps)(self.next)


def _in_one_warp(run: Callable[[], None]) -> None:
    """Run in the first warp of the warpgroup."""
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


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
    refs: token.NormRefs,
    scratch: _Scratch,
) -> None:
    """Add and normalise the token with the other compute warpgroups; the ``first`` CTA also writes
    the sum.
    """
    plain, _ = token.views(scratch.x_smem)
    count = spec.config.warpgroups
    share = token.Share(warpgroup, count, scratch.squares_smem, scratch.squares_barrier)
    found = token.normed_token(norm, refs, share)
    for span, normed in zip(found.spans, found.normed, strict=True):
        plain[span, 0, :] = normed
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.normed_barrier)
    pl.when(first)(partial(token.write_total, found, refs))
    plgpu.barrier_wait(scratch.normed_barrier)


def _accumulate(
    spec: Spec, warpgroup: jax.Array, copies: _Copies
) -> Sequence[jax.Array]:  # float32[64, block_t] each
    """A warpgroup's part of the result."""
    tile, scratch, stages = copies.tile, copies.scratch, spec.config.stages

    def add(step: jax.Array, totals: Sequence[jax.Array]) -> Sequence[jax.Array]:
        stage = _stage(spec, step)
        if spec.config.own_copies:
            further = step - 1 + stages  # in the stage of the previous step

            @pl.when((warpgroup == 0) & (step > 0) & (further < tile.num_steps))
            def _copy() -> None:
                _in_one_warp(lambda: copies.next(further))

        plgpu.barrier_wait(scratch.barriers.at[stage])
        inputs = Step(spec, stage, warpgroup, scratch)
        if spec.norm is not None:
            inputs = _NormedStep(spec, stage, warpgroup, scratch, step=step)
        totals = inputs.add(totals)

        # The stages of the last steps are not reused, so no copy waits for their release.
        @pl.when(step + stages < tile.num_steps)
        def _release() -> None:
            plgpu.barrier_arrive(scratch.consumed_barriers.at[stage])

        return totals

    shape = (TILE, spec.config.block_t)
    init = [zeros(shape) for _ in range(spec.results)]
    return lax.fori_loop(0, tile.num_steps, add, init)


def _compute_warpgroup(spec: Spec, warpgroup: jax.Array, out: Ref, copies: _Copies) -> None:
    """Multiply, and add up the results of the warpgroups; the first one writes the sum."""
    tile, scratch = copies.tile, copies.scratch
    totals = _accumulate(spec, warpgroup, copies)
    if spec.config.warpgroups == 1:
        write(spec, tile.index, tile.token, totals, out)
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
        write(spec, tile.index, tile.token, list(results.values()), out)


def _kernel(spec: Spec, gmem: Gmem, scratch: _Scratch) -> None:
    launch_dependents()
    tile, warpgroup = _cta_tile(spec), lax.axis_index("warpgroup")
    copies = _Copies(spec, tile, gmem, scratch)
    if spec.config.own_copies:
        pl.when(warpgroup == 0)(lambda: _in_one_warp(copies.first))
    else:
        pl.when(warpgroup == spec.config.warpgroups)(lambda: _in_one_warp(copies.all))

    @pl.when(warpgroup < spec.config.warpgroups)
    def _compute() -> None:
        if spec.norm is not None:
            _write_normed(spec, spec.norm, warpgroup, tile.index == 0, gmem.x, scratch)
        out = gmem.out if spec.config.split_k == 1 else gmem.out.at[lax.axis_index("split")]
        _compute_warpgroup(spec, warpgroup, out, copies)


def _scratch_types(spec: Spec, parts: Parts) -> _Scratch:
    """``parts`` are the arrays of factors, [halves, O / 64, groups, 64] each."""
    config, sizes = spec.config, spec.sizes
    stages, halves, block_t = config.stages, sizes.halves, config.block_t

    columns = next(size for size in (32, 16, 8) if block_t % size == 0)
    values, parts_smem = weight_types(spec, parts, halves)
    tokens, of_chunks = (stages, block_t, config.block_k), swizzled(spec.chunk, 2)
    if sizes.normed:
        tokens = (sizes.inner // spec.chunk, block_t, spec.chunk)
    x_smem: Any = plgpu.SMEM(tokens, jnp.bfloat16, transforms=of_chunks)
    squares = (config.warpgroups, token.SPAN // spec.chunk)
    if sizes.normed:
        x_smem = token.ref_union(plgpu.SMEM(tokens, jnp.bfloat16), x_smem)
    return _Scratch(
        x_smem=x_smem,
        values_smem=values,
        parts_smem=parts_smem,
        sums_smem=plgpu.SMEM(
            (max(1, config.warpgroups - 1), spec.results, TILE, block_t),
            jnp.float32,
            transforms=swizzled(columns, 4),
        ),
        barriers=plgpu.Barrier(
            num_arrivals=2 - sizes.normed + sum(part is not None for part in parts),
            num_barriers=stages,
        ),
        consumed_barriers=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        sums_barrier=plgpu.Barrier(num_arrivals=max(1, config.warpgroups - 1)),
        squares_smem=plgpu.SMEM(squares, jnp.float32) if sizes.normed else None,
        squares_barrier=plgpu.Barrier(num_arrivals=config.warpgroups) if sizes.normed else None,
        normed_barrier=plgpu.Barrier(num_arrivals=config.warpgroups) if sizes.normed else None,
    )


@jax.jit  # one trace for all layers
def quantised_gemm(args: QuantisedGemmArgs) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``quantised_gemm.api``; the weights are arranged (``tiled.arrange``)."""
    return launch_with(choose_config(sizes_of(args)), args)


def launch_with(
    config: TiledConfig, args: QuantisedGemmArgs
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """``quantised_gemm`` with a given configuration.

    Raises ValueError when the configuration does not fit the call.
    """
    sizes = sizes_of(args)
    if not config.fits(sizes):
        raise ValueError(f"{config} does not fit {sizes}")
    spec = Spec(sizes, config)
    tiles, parts = gmem_views(sizes, args.w)
    present = [part for part in parts if part is not None]

    def body(x: Ref, tiles: Ref, *refs: Ref) -> None:
        *rest, out, scratch = refs
        _kernel(spec, Gmem(x, tiles, parts.named(rest), out), scratch)

    return plgpu.kernel(
        body,
        out_type=result_shape(config, sizes),
        scratch_types=(_scratch_types(spec, parts),),
        grid=(config.split_k, -(-sizes.tokens // config.block_t), sizes.outer // TILE),
        grid_names=("split", "tokens", "tile"),
        num_threads=config.warpgroups + (not config.own_copies),
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="quantised_gemm",
    )(args.x, tiles, *present)


@jax.jit  # one trace for all layers
def norm_gemm(args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:  # [1, K], [1, O]
    """See ``norm_gemm.api``; the weights are arranged (``tiled.arrange``)."""
    return launch_normed(choose_config(sizes_of(args.gemm(args.norm.x), normed=True)), args)


def launch_normed(config: TiledConfig, args: NormGemmArgs) -> tuple[jax.Array, jax.Array]:
    """``norm_gemm`` with a given configuration; tests call it too."""
    gemm, norm = args.gemm(args.norm.x), args.norm
    sizes = sizes_of(gemm, normed=True)
    spec = Spec(sizes, config, norm=token.Norm(norm.row, norm.eps))
    tiles, parts = gmem_views(sizes, gemm.w)
    present = [part for part in parts if part is not None]
    arrays, total_type = token.norm_arrays(norm, spec.chunk)

    def body(x: Ref, partials: Ref, norms: Ref, tiles: Ref, *refs: Ref) -> None:
        *rest, total, out, scratch = refs
        of_norm = token.NormRefs(x, partials, norms, total)
        _kernel(spec, Gmem(of_norm, tiles, parts.named(rest), out), scratch)

    total, out = plgpu.kernel(
        body,
        out_type=(total_type, result_shape(spec.config, sizes)),
        scratch_types=(_scratch_types(spec, parts),),
        grid=(1, 1, sizes.outer // TILE),
        grid_names=("split", "tokens", "tile"),
        num_threads=spec.config.warpgroups + (not spec.config.own_copies),
        thread_name="warpgroup",
        # The automatic barriers would make all threads wait around each store. They are not
        # needed: no store is read before ``commit_smem``.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="norm_quantised_gemm",
    )(*arrays, tiles, *present)
    return total.reshape(norm.x.shape), out
