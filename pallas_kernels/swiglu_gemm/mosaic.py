"""swiglu_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

As many programs as there are multiprocessors make tile after tile. One warp of a program asks for
tokens and weights by TMA, steps ahead and on into the next tile; two warpgroups multiply, each half
of the tile's tokens with all its columns. A tile's gates lie beside its ups in shared memory, so
that one instruction of the matrix units multiplies both, or two where they are wider, and a thread
finds the gate and the up of a result in its own registers. While one warpgroup makes results of its
sums, the other has the matrix units. The shape of this is that of CUTLASS's cooperative kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import current_device
from pallas_kernels.pdl import await_kernel_before, let_next_begin
from pallas_kernels.swiglu_gemm.launch import (
    ITEM_BYTES,
    WIDEST,
    WORKERS,
    Launch,
    Sizes,
    choose,
    results,
    sizes_of,
)

WORKER_REGISTERS, LOADER_REGISTERS = 232, 40  # of a thread: 504 of the 512 there are for three

type Ref = Any


@dataclass(frozen=True)
class _Plan:
    """What is known when the kernel is compiled."""

    sizes: Sizes
    choice: Launch

    @property
    def rows(self) -> int:
        """Of a worker in a tile."""
        return self.choice.block_t // WORKERS

    @property
    def steps(self) -> int:
        """Of a tile."""
        return self.sizes.inner // self.choice.block_k

    @property
    def across(self) -> tuple[int, int]:
        """Tiles of a cluster along tokens and columns; the last ones may overhang."""
        choice = self.choice
        tokens = choice.block_t * choice.cluster
        return -(-self.sizes.tokens // tokens), -(-self.sizes.outer // choice.block_n)

    @property
    def tiles(self) -> int:
        """Of a cluster."""
        along, across = self.across
        return along * across

    @property
    def clusters(self) -> int:
        """That work side by side."""
        return min(current_device().multiprocessors // self.choice.cluster, self.tiles)


class _Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    x: Ref  # [stages, block_t, block_k]
    w: Ref  # [stages, block_k, 2, block_n]: gate, up
    out: Ref  # [WORKERS, rows, block_n]
    full: Ref  # [stages]: one arrival a copy
    free: Ref  # [stages]: one arrival a worker of the cluster
    ahead: Ref  # the first worker is as far ahead of the second as it is to be


class _Tile(NamedTuple):
    """Where a program works; int32 scalars."""

    token: jax.Array  # the first
    column: jax.Array  # the first, in the result
    step: jax.Array  # its first, of all the program's steps


def _own_tiles(plan: _Plan) -> jax.Array:
    """How many tiles the program makes."""
    return lax.div(plan.tiles - 1 - lax.axis_index("program"), jnp.int32(plan.clusters)) + 1


def _tile(plan: _Plan, turn: jax.Array) -> _Tile:
    """The program's tile of a turn. In each turn all clusters together make a compact region."""
    choice = plan.choice
    index = turn * plan.clusters + lax.axis_index("program")
    along, across = plgpu.planar_snake(index, plan.across, 0, choice.group)
    block = along * choice.cluster + lax.axis_index("rank")
    return _Tile(block * choice.block_t, across * choice.block_n, turn * plan.steps)


def _stage(plan: _Plan, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(plan.choice.stages))


def _load(plan: _Plan, x: Ref, w: Ref, shared: _Shared) -> None:  # [T, I], [I, 2, O]
    """Copy step after step as room becomes free; the first weights before there are tokens."""
    choice, turns = plan.choice, _own_tiles(plan)
    total = turns * plan.steps
    together = "rank" if choice.cluster > 1 else None

    def inner(step: jax.Array) -> Any:
        return pl.ds(step * choice.block_k, choice.block_k)

    def copy_weights(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(plan, tile.step + step)
        columns = w.at[inner(step), :, pl.ds(tile.column, choice.block_n)]
        room, full = shared.w.at[stage], shared.full.at[stage]
        plgpu.copy_gmem_to_smem(columns, room, full, collective_axes=together)

    def copy_tokens(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(plan, tile.step + step)
        tokens = x.at[pl.ds(tile.token, choice.block_t), inner(step)]  # those x lacks become zeros
        plgpu.copy_gmem_to_smem(tokens, shared.x.at[stage], shared.full.at[stage])

    def copy(tile: _Tile, step: jax.Array) -> None:
        stage = _stage(plan, tile.step + step)
        pl.when(tile.step + step >= choice.stages)(
            lambda: plgpu.barrier_wait(shared.free.at[stage])
        )
        copy_weights(tile, step)
        copy_tokens(tile, step)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _copy() -> None:
            first, at_once = _tile(plan, jnp.int32(0)), min(choice.stages, plan.steps)
            pl.loop(0, at_once)(lambda step: copy_weights(first, step))
            await_kernel_before()
            pl.loop(0, at_once)(lambda step: copy_tokens(first, step))
            pl.loop(at_once, plan.steps)(lambda step: copy(first, step))

            @pl.loop(1, turns)
            def _turn(turn: jax.Array) -> None:
                tile = _tile(plan, turn)
                pl.loop(0, plan.steps)(lambda step: copy(tile, step))

            @pl.loop(jnp.maximum(total - choice.stages, 0), total)
            def _see_through(step: jax.Array) -> None:  # a barrier left early is an error
                plgpu.barrier_wait(shared.free.at[_stage(plan, step)])


def _multiply(sums: tuple[Ref, ...], x: Ref, w: Ref) -> None:
    """Begin to add [rows, block_k] @ [block_k, 2 * block_n]: gates beside ups, or then ups.

    JAX's interpreter cannot see ``w``, [block_k, 2, block_n], as it is here.
    """
    both = w.reshape(w.shape[0], 2 * w.shape[2])
    for i, total in enumerate(sums):
        width = total.shape[1]
        plgpu.wgmma(total, x, both.at[:, i * width : (i + 1) * width])


def _product(
    plan: _Plan, tile: _Tile, worker: jax.Array, shared: _Shared
) -> tuple[jax.Array, jax.Array]:  # float32[rows, block_n]: gate, up
    """Multiply step after step as it arrives, the next asked for while one is under way."""
    choice = plan.choice

    def release(step: jax.Array | int) -> None:
        plgpu.barrier_arrive(shared.free.at[_stage(plan, tile.step + step)])

    def multiply(*sums: Ref) -> tuple[jax.Array, jax.Array]:
        def begin(step: jax.Array | int) -> None:
            stage = _stage(plan, tile.step + step)
            plgpu.barrier_wait(shared.full.at[stage])
            tokens = shared.x.at[stage, pl.ds(worker * plan.rows, plan.rows)]
            _multiply(sums, tokens, shared.w.at[stage])

        def follow(step: jax.Array | int) -> None:
            begin(step)
            plgpu.wgmma_wait(len(sums))  # for those of the step before
            release(step - 1)

        first = max(choice.lead, 1)
        if choice.lead:
            pl.when(worker > 0)(lambda: plgpu.barrier_wait(shared.ahead))
        begin(0)
        for step in range(1, first):
            follow(step)
        if choice.lead:
            pl.when(worker == 0)(lambda: plgpu.barrier_arrive(shared.ahead))

        @pl.loop(first, plan.steps)
        def _step(step: jax.Array) -> None:
            follow(step)

        if len(sums) == 2:
            return sums[0][...], sums[1][...]
        both = sums[0][...]
        return both[:, : choice.block_n], both[:, choice.block_n :]

    count = -(-2 * choice.block_n // WIDEST)
    shape = (plan.rows, 2 * choice.block_n // count)
    sums = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * count
    total = pl.run_scoped(multiply, *sums)
    release(plan.steps - 1)
    return total


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """A reciprocal root, squared, is one instruction where a quotient is several."""
    root = lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * up * root * root


def _work(plan: _Plan, worker: jax.Array, out: Ref, shared: _Shared) -> None:  # [T, O]
    """One warpgroup's rows of all the program's tiles."""
    block_n = plan.choice.block_n
    room = shared.out.at[worker]

    @pl.loop(0, _own_tiles(plan))
    def _turn(turn: jax.Array) -> None:
        tile = _tile(plan, turn)
        gate, up = _product(plan, tile, worker, shared)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
        room[...] = _swiglu(gate, up).astype(out.dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile.token + worker * plan.rows, plan.rows)  # those that it lacks are left out
        plgpu.copy_smem_to_gmem(room, out.at[rows, pl.ds(tile.column, block_n)])

    plgpu.wait_smem_to_gmem(0)


def _kernel(plan: _Plan, x: Ref, w: Ref, out: Ref, shared: _Shared) -> None:
    let_next_begin()
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == WORKERS)
    def _loader() -> None:
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        _load(plan, x, w, shared)

    @pl.when(warpgroup < WORKERS)
    def _worker() -> None:
        plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
        _work(plan, warpgroup, out, shared)


def _shared_types(plan: _Plan, dtype: Any) -> _Shared:
    choice = plan.choice
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    lanes = choice.lanes
    rows = (tiling((8, lanes)), swizzle(lanes * ITEM_BYTES))
    halves = (tiling((8, 1, lanes)), swizzle(lanes * ITEM_BYTES))
    free: Any = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=choice.stages)
    if choice.cluster > 1:
        free = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=WORKERS, num_barriers=choice.stages
        )
    return _Shared(
        x=plgpu.SMEM((choice.stages, choice.block_t, choice.block_k), dtype, transforms=rows),
        w=plgpu.SMEM((choice.stages, choice.block_k, 2, choice.block_n), dtype, transforms=halves),
        out=plgpu.SMEM((WORKERS, plan.rows, choice.block_n), dtype, transforms=rows),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=choice.stages),
        free=free,
        ahead=plgpu.Barrier(),
    )


@jax.jit  # one trace, one kernel for all layers
def swiglu_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> jax.Array:  # [T, O]
    """See ``swiglu_gemm.api``."""
    return launched(choose(sizes_of(x, w)), x, w)


def launched(
    choice: Launch,
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, 2 * O]: gate, up
) -> jax.Array:  # [T, O]
    """``swiglu_gemm`` cut up as ``choice`` says; for it and for the tuner."""
    sizes = sizes_of(x, w)
    if not choice.cuts_up(sizes):
        raise ValueError(f"{choice} does not cut up {sizes}")
    plan = _Plan(sizes, choice)

    def body(*refs: Ref, **scratch: Ref) -> None:
        _kernel(plan, *refs, shared=_Shared(**scratch))

    return plgpu.kernel(
        body,
        out_type=results(x, w),
        scratch_types=_shared_types(plan, x.dtype)._asdict(),
        grid=(plan.clusters,),
        grid_names=("program",),
        cluster=(choice.cluster,),
        cluster_names=("rank",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="swiglu_gemm",
    )(x, w.reshape(sizes.inner, 2, sizes.outer))
