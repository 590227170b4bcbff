"""skinny_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x).

With few tokens a product is as fast as its weights arrive. One warpgroup of a program does nothing
but ask for them by TMA, many steps ahead; the others multiply. The product is turned around: 64
columns of weights are what the matrix units always take at once, and tokens, of which they take any
multiple of 8, the other side. So no unit works on padding, and weights go from memory to shared
memory to the units without passing through registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pdl import await_kernel_before, let_next_begin
from pallas_kernels.skinny_gemm.cases import Sizes, sizes_of
from pallas_kernels.skinny_gemm.launch import COLUMNS, TOKENS, Launch, choose, result_of

type Ref = Any


@dataclass(frozen=True)
class _Plan:
    """What is known when the kernel is compiled."""

    sizes: Sizes
    choice: Launch

    @property
    def halves(self) -> int:
        """Of the weights: gate and up, or one whole."""
        return 1 + self.sizes.swiglu

    @property
    def rows(self) -> int:
        """Of tokens in shared memory."""
        return max(self.sizes.tokens, TOKENS)

    @property
    def by_columns(self) -> bool:
        """Whether warpgroups share columns; they share tokens otherwise."""
        return self.choice.block_n // COLUMNS >= self.choice.warpgroups

    @property
    def share(self) -> tuple[int, int]:
        """Columns and tokens of a warpgroup."""
        block_n, warpgroups = self.choice.block_n, self.choice.warpgroups
        if self.by_columns:
            return block_n // warpgroups, self.rows
        return block_n, self.rows // warpgroups


class _Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    w: Ref  # [stages, 1 or 2, block_k, block_n]
    x: Ref  # [stages, rows, block_k]
    full: Ref  # [stages]: one arrival a copy
    free: Ref  # [stages]: one arrival a warpgroup


class _Span(NamedTuple):
    """What a program reads; int32 scalars."""

    column: jax.Array  # the first, in the result
    first: jax.Array  # step, from the start of the inner axis
    steps: jax.Array


def _span(plan: _Plan) -> _Span:
    part, choice = lax.axis_index("part"), plan.choice
    steps = plan.sizes.inner // choice.block_k
    first = lax.div(part * steps, jnp.int32(choice.parts))
    end = lax.div((part + 1) * steps, jnp.int32(choice.parts))
    return _Span(lax.axis_index("tile") * choice.block_n, first, end - first)


def _stage(plan: _Plan, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(plan.choice.stages))


def _load(plan: _Plan, span: _Span, x: Ref, w: Ref, shared: _Shared) -> None:  # [T, I], [I, ...]
    """Copy step after step as room becomes free; the first weights before there are tokens."""
    block_n, block_k = plan.choice.block_n, plan.choice.block_k

    def inner(step: jax.Array) -> Any:
        return pl.ds((span.first + step) * block_k, block_k)

    def copy_weights(step: jax.Array) -> None:
        stage = _stage(plan, step)
        for half in range(plan.halves):
            columns = pl.ds(half * plan.sizes.outer + span.column, block_n)
            room = shared.w.at[stage, half]
            plgpu.copy_gmem_to_smem(w.at[inner(step), columns], room, shared.full.at[stage])

    def copy_tokens(step: jax.Array) -> None:
        stage = _stage(plan, step)
        tokens = x.at[pl.ds(0, plan.rows), inner(step)]  # rows that x lacks become zeros
        plgpu.copy_gmem_to_smem(tokens, shared.x.at[stage], shared.full.at[stage])

    at_once = jnp.minimum(span.steps, plan.choice.stages)
    pl.loop(0, at_once)(copy_weights)
    await_kernel_before()
    pl.loop(0, at_once)(copy_tokens)

    @pl.loop(at_once, span.steps)
    def _step(step: jax.Array) -> None:
        plgpu.barrier_wait(shared.free.at[_stage(plan, step)])
        copy_weights(step)
        copy_tokens(step)


def _product(
    plan: _Plan, span: _Span, columns: Any, tokens: Any, shared: _Shared
) -> tuple[jax.Array, ...]:  # float32[columns, tokens] of each half
    """Multiply step after step as it arrives, the next asked for while one is under way."""

    def multiply(*sums: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, span.steps)
        def _step(step: jax.Array) -> None:
            stage = _stage(plan, step)
            plgpu.barrier_wait(shared.full.at[stage])
            x = shared.x.at[stage, tokens].transpose((1, 0))
            for half, total in enumerate(sums):
                w = shared.w.at[stage, half, :, columns].transpose((1, 0))
                plgpu.wgmma(total, w, x)
            plgpu.wgmma_wait(plan.halves)  # for those of the step before

            # The room of the last steps is not used again, so that nobody waits for it.
            @pl.when((step > 0) & (step - 1 + plan.choice.stages < span.steps))
            def _release() -> None:
                plgpu.barrier_arrive(shared.free.at[_stage(plan, step - 1)])

        return tuple(total[...] for total in sums)

    sums = [plgpu.WGMMAAccumulatorRef(plan.share, jnp.float32)] * plan.halves
    return pl.run_scoped(multiply, *sums)


def _work(plan: _Plan, span: _Span, worker: jax.Array, out: Ref, shared: _Shared) -> None:
    """One warpgroup's share of the result, [T, O], written from registers."""
    width, count = plan.share
    column, token = (worker * width, 0) if plan.by_columns else (0, worker * count)
    tokens = pl.ds(token, count)
    sums = _product(plan, span, pl.ds(column, width), tokens, shared)
    total = sums[0]
    if plan.sizes.swiglu:
        total = total / (1.0 + jnp.exp(-total)) * sums[1]
    columns = pl.ds(span.column + column, width)
    if plan.sizes.tokens >= TOKENS:
        # Two columns of a token side by side in a register's pair, instead of two tokens.
        total = plgpu.layout_cast(total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        out.at[tokens, columns].transpose((1, 0))[...] = total
        return
    at = plgpu.broadcasted_iota(jnp.int32, total.shape, 1, layout=plgpu.Layout.WGMMA)
    for i in range(plan.sizes.tokens):
        row = jnp.where(at == i, total, 0.0).sum(axis=1)
        out.at[i, columns][...] = row.astype(out.dtype)


def _kernel(plan: _Plan, x: Ref, w: Ref, out: Ref, shared: _Shared) -> None:
    let_next_begin()
    span, warpgroup = _span(plan), lax.axis_index("warpgroup")

    @pl.when(warpgroup == plan.choice.warpgroups)
    def _loader() -> None:
        _load(plan, span, x, w, shared)

    @pl.when(warpgroup < plan.choice.warpgroups)
    def _worker() -> None:
        part = out if plan.choice.parts == 1 else out.at[lax.axis_index("part")]
        _work(plan, span, warpgroup, part, shared)


def _shared_types(plan: _Plan) -> _Shared:
    choice, dtype = plan.choice, plan.sizes.dtype
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, COLUMNS)), swizzle(128))
    weights = (choice.stages, plan.halves, choice.block_k, choice.block_n)
    tokens = (choice.stages, plan.rows, choice.block_k)
    return _Shared(
        w=plgpu.SMEM(weights, dtype, transforms=swizzled),
        x=plgpu.SMEM(tokens, dtype, transforms=swizzled),
        full=plgpu.Barrier(num_arrivals=plan.halves + 1, num_barriers=choice.stages),
        free=plgpu.Barrier(num_arrivals=choice.warpgroups, num_barriers=choice.stages),
    )


@partial(jax.jit, static_argnames=("swiglu", "split"))  # one trace, one kernel for all layers
def skinny_gemm(
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    *,
    swiglu: bool,
    split: bool,
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """See ``skinny_gemm.api``."""
    choice = choose(sizes_of(x, w, swiglu=swiglu, split=split))
    return launched(choice, x, w, swiglu=swiglu, split=split)


def launched(
    choice: Launch,
    x: jax.Array,  # [T, I]
    w: jax.Array,  # [I, O]; with swiglu [I, 2 * O]: gate, up
    *,
    swiglu: bool,
    split: bool,
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """``skinny_gemm`` cut up as ``choice`` says; for it and for the tuner."""
    sizes = sizes_of(x, w, swiglu=swiglu, split=split)
    if not choice.cuts_up(sizes):
        raise ValueError(f"{choice} does not cut up {sizes}")
    plan = _Plan(sizes, choice)

    def body(*refs: Ref, **scratch: Ref) -> None:
        _kernel(plan, *refs, shared=_Shared(**scratch))

    return plgpu.kernel(
        body,
        out_type=result_of(choice, sizes),
        scratch_types=_shared_types(plan)._asdict(),
        grid=(choice.parts, sizes.outer // choice.block_n),  # columns side by side
        grid_names=("part", "tile"),
        num_threads=choice.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="skinny_gemm",
    )(x, w)
