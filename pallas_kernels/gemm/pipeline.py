"""The pipeline of a GEMM in Pallas Mosaic GPU: TMA copies of K steps, and the matmuls of them.

A warpgroup for memory issues copies several K steps ahead, into stages of shared memory. The
compute warpgroups wait for a stage's copies, multiply, and release it. The first weights are copied
before the previous kernel has ended (``pdl``), tokens after it. The structure is that of CUTLASS's
kernels with specialised warps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.tiles import Tile, TileGrid
from pallas_kernels.lib.pdl import grid_dependency_wait

# Registers of a thread by the number of compute warpgroups: compute, memory. Together they are 504
# of the 512 that a CTA's warpgroups may use.
REGISTERS = MappingProxyType({2: (232, 40), 3: (160, 24)})

type Ref = Any
type Issue = Callable[[jax.Array, jax.Array, Sequence[Ref]], int]


@dataclass(frozen=True)
class Ring:
    """The stages of a CTA, which K steps use round-robin."""

    stages: int
    barriers: Ref  # [stages]: one arrival per copy
    consumed_barriers: Ref  # [stages]: one arrival per compute warpgroup

    def stage(self, step: jax.Array) -> jax.Array:
        """The stage of a K step."""
        return lax.rem(step, jnp.int32(self.stages))

    def wait_consumed(self, step: jax.Array) -> None:
        """Wait until the stage of a K step has been released."""
        plgpu.barrier_wait(self.consumed_barriers.at[self.stage(step)])

    def release(self, step: jax.Array) -> None:
        """Release the stage of a K step."""
        plgpu.barrier_arrive(self.consumed_barriers.at[self.stage(step)])

    def release_if_reused(self, stage: jax.Array, step: jax.Array, num_steps: jax.Array) -> None:
        """Release a stage but those of the last steps: no copy waits for them."""

        @pl.when(step + self.stages < num_steps)
        def _release() -> None:
            plgpu.barrier_arrive(self.consumed_barriers.at[stage])

    def release_previous_if_reused(self, step: jax.Array, num_steps: jax.Array | int) -> None:
        """The same of the step before ``step``."""
        reused = (step > 0) & (step - 1 + self.stages < num_steps)
        pl.when(reused)(lambda: self.release(step - 1))

    def drain(self, total_steps: jax.Array) -> None:
        """Wait for the last steps: a CTA must not exit while a barrier has a phase that was not
        waited for.
        """
        first = jnp.maximum(total_steps - self.stages, 0)
        pl.loop(first, total_steps)(self.wait_consumed)


def copy_steps(
    ring: Ring,
    num_steps: jax.Array | int,
    copy_weights: Callable[[jax.Array], None],
    copy_tokens: Callable[[jax.Array], None] | None = None,
    *,
    waits: bool = True,
) -> None:
    """Copy the K steps of a CTA with one tile as stages are consumed.

    Without ``copy_tokens`` the compute warpgroups make them, and wait for the previous kernel.
    """
    smaller: Any = min if isinstance(num_steps, int) else jnp.minimum
    prologue = smaller(num_steps, ring.stages)
    pl.loop(0, prologue)(copy_weights)
    if waits:
        grid_dependency_wait()
    if copy_tokens is not None:
        pl.loop(0, prologue)(copy_tokens)

    @pl.loop(prologue, num_steps)
    def _step(step: jax.Array) -> None:
        ring.wait_consumed(step)
        copy_weights(step)
        if copy_tokens is not None:
            copy_tokens(step)


def copy_tiles(
    ring: Ring,
    grid: TileGrid,
    num_steps: int,  # of a tile
    tile_at: Callable[[jax.Array], Tile],
    copy_weights: Callable[[Tile, jax.Array], None],
    copy_tokens: Callable[[Tile, jax.Array], None],
) -> None:
    """Copy the K steps of a persistent CTA's tiles as stages are consumed; in one warp."""
    num_tiles = grid.tiles_of_cta()
    total_steps = num_tiles * num_steps

    def copy(tile: Tile, step: jax.Array) -> None:
        stage = ring.stage(tile.first_step + step)
        consumed = ring.consumed_barriers.at[stage]
        is_reused = tile.first_step + step >= ring.stages
        pl.when(is_reused)(lambda: plgpu.barrier_wait(consumed))
        copy_weights(tile, step)
        copy_tokens(tile, step)

    @in_one_warp
    def _copy() -> None:
        first, prologue = tile_at(jnp.int32(0)), min(ring.stages, num_steps)
        pl.loop(0, prologue)(lambda step: copy_weights(first, step))
        grid_dependency_wait()
        pl.loop(0, prologue)(lambda step: copy_tokens(first, step))
        pl.loop(prologue, num_steps)(lambda step: copy(first, step))

        @pl.loop(1, num_tiles)
        def _next_tile(i: jax.Array) -> None:
            tile = tile_at(i)
            pl.loop(0, num_steps)(lambda step: copy(tile, step))

        ring.drain(total_steps)


def in_one_warp(run: Callable[[], None]) -> None:
    """Run in the first warp of the warpgroup."""
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


def matmul(
    ring: Ring,
    num_steps: jax.Array | int,
    shape: tuple[int, int],
    issue: Issue,  # of a step, its stage and accumulators; returns the number of its wgmmas
    release: Callable[[jax.Array], None],  # the stage of the step before
    *,
    count: int = 1,  # of accumulators
    first_step: jax.Array | None = None,  # among all K steps of the CTA
    before: Callable[[], None] | None = None,
) -> tuple[jax.Array, ...]:  # float32 of that shape, one for each accumulator
    """Accumulate over the K steps; a wgmma is issued before the previous one has ended."""

    def multiply(*accs: Ref) -> tuple[jax.Array, ...]:
        if before is not None:
            before()

        @pl.loop(0, num_steps)
        def _step(step: jax.Array) -> None:
            stage = ring.stage(step if first_step is None else first_step + step)
            plgpu.barrier_wait(ring.barriers.at[stage])
            plgpu.wgmma_wait(issue(step, stage, accs))  # wait for the previous step
            release(step)

        return tuple(acc[...] for acc in accs)

    accs = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * count
    return pl.run_scoped(multiply, *accs)


def divide_roles(
    compute_warpgroups: int,
    memory: Callable[[], None],
    compute: Callable[[jax.Array], None],  # of the warpgroup
    *,
    moves_registers: bool = False,
    warpgroup: jax.Array | None = None,  # the own one, if it is known
) -> None:
    """Run ``memory`` in the CTA's last warpgroup, ``compute`` in the others.

    ``moves_registers`` gives the compute warpgroups most of the memory warpgroup's.
    """
    warpgroup = lax.axis_index("warpgroup") if warpgroup is None else warpgroup

    @pl.when(warpgroup == compute_warpgroups)
    def _memory() -> None:
        if moves_registers:
            plgpu.set_max_registers(REGISTERS[compute_warpgroups][1], action="decrease")
        memory()

    @pl.when(warpgroup < compute_warpgroups)
    def _compute() -> None:
        if moves_registers:
            plgpu.set_max_registers(REGISTERS[compute_warpgroups][0], action="increase")
        compute(warpgroup)


def launch(
    name: str,
    kernel: Callable[[Any, Any, Any], None],  # of refs to inputs, to results, and scratch
    inputs: Any,  # a tree of arrays in global memory
    *,
    out_type: Any,  # a tree, too
    scratch: Any,
    grid: Mapping[str, int],
    warpgroups: int,  # of compute and memory
    cluster: int | None = None,  # CTAs along "rank"
    auto_barriers: bool = True,
) -> Any:
    """Run a kernel, which takes refs in trees like those of the arrays; returns its results.

    The ``auto_barriers`` make all threads wait around each store to shared memory. They are not
    needed where no store is read before ``commit_smem``.
    """
    clusters: Any = {} if cluster is None else {"cluster": (cluster,), "cluster_names": ("rank",)}
    barriers: Any = {} if auto_barriers else {"unsafe_no_auto_barriers": True}
    arrays, tree = jax.tree.flatten(inputs)
    result_types, result_tree = jax.tree.flatten(out_type)

    def body(*refs: Ref) -> None:
        in_refs, out_refs = refs[: len(arrays)], refs[len(arrays) : -1]
        kernel(tree.unflatten(in_refs), result_tree.unflatten(out_refs), refs[-1])

    results = plgpu.kernel(
        body,
        out_type=result_types,
        scratch_types=(scratch,),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        **clusters,
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, **barriers),
        kernel_name=name,
    )(*arrays)
    return result_tree.unflatten(results)
