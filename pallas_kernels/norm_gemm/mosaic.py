"""norm_gemm in Pallas Mosaic GPU, for NVIDIA Hopper (compute capability 9.x), of one token.

A product of one token waits for its weights, and a norm before it for what the last product left;
a launch for each has the memory idle in between. Here every program adds and norms the token by
itself, over and over, while the first of its weights are on their way. They come as in
``skinny_gemm``: one warpgroup asks for them by TMA, many steps ahead, the other multiplies, and the
product is turned around, so that 64 columns of weights are what the matrix units take at once.

They take tokens by eight, in swizzled tiles [8, 64]. In the first row of such a tile nothing has
moved. So the token is written there as if tiles were not swizzled, and the other rows, whose
results nobody looks at, are left as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.norm_gemm.launch import COLUMNS, ROWS, Launch, Sizes, choose, sizes_of
from pallas_kernels.pdl import let_next_begin
from pallas_kernels.residual_norm.token import added_and_normed

type Ref = Any


class _Plan(NamedTuple):
    """What is known when the kernel is compiled."""

    sizes: Sizes
    choice: Launch
    row: int
    eps: float
    dtype: Any

    @property
    def halves(self) -> int:
        """Of the weights: gate and up, or one whole."""
        return 1 + self.sizes.swiglu

    @property
    def tiles(self) -> int:
        """Of the token."""
        return self.sizes.inner // COLUMNS

    @property
    def steps(self) -> int:
        """Of a program."""
        return self.sizes.inner // self.choice.block_k


class _Arrays(NamedTuple):
    """What lies in global memory; a token is cut into tiles."""

    x: Ref  # [tiles, COLUMNS]
    parts: Ref  # [S, tiles, COLUMNS]
    norms: Ref  # [W, tiles, COLUMNS]
    w: Ref  # [D, O]; with swiglu [D, 2 * O]
    total: Ref  # [tiles, COLUMNS]
    out: Ref  # [1, O]


class _Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    w: Ref  # [stages, 1 or 2, block_k, COLUMNS]
    tokens: Ref  # [tiles, ROWS, COLUMNS], see ``_both_views``
    full: Ref  # [stages]: one arrival a copy
    free: Ref  # [stages]


def _one_room(plain: Any, swizzled: Any) -> Any:
    """Shared memory that is seen in two ways. JAX's interpreter gives each its own."""
    return plgpu.RefUnion(plain, swizzled)


def _both_views(room: Ref) -> tuple[Ref, Ref]:
    """What ``_one_room`` was asked for."""
    return room[0], room[1]


def _stage(plan: _Plan, step: jax.Array) -> jax.Array:
    return lax.rem(step, jnp.int32(plan.choice.stages))


def _load(plan: _Plan, column: jax.Array, w: Ref, shared: _Shared) -> None:  # [D, ...]
    """Copy step after step as room becomes free."""
    block_k, at_once = plan.choice.block_k, min(plan.choice.stages, plan.steps)

    def copy(step: jax.Array) -> None:
        stage = _stage(plan, step)
        for half in range(plan.halves):
            columns = pl.ds(half * plan.sizes.outer + column, COLUMNS)
            source = w.at[pl.ds(step * block_k, block_k), columns]
            plgpu.copy_gmem_to_smem(source, shared.w.at[stage, half], shared.full.at[stage])

    pl.loop(0, at_once)(copy)

    @pl.loop(at_once, plan.steps)
    def _step(step: jax.Array) -> None:
        plgpu.barrier_wait(shared.free.at[_stage(plan, step)])
        copy(step)


def _product(plan: _Plan, tokens: Ref, shared: _Shared) -> tuple[jax.Array, ...]:
    """Multiply step after step as it arrives: float32[COLUMNS, ROWS] of each half."""
    tiles = plan.choice.block_k // COLUMNS  # of a step

    def multiply(*sums: Ref) -> tuple[jax.Array, ...]:
        @pl.loop(0, plan.steps)
        def _step(step: jax.Array) -> None:
            stage = _stage(plan, step)
            plgpu.barrier_wait(shared.full.at[stage])
            for tile in range(tiles):
                x = tokens.at[step * tiles + tile].transpose((1, 0))
                for half, total in enumerate(sums):
                    w = shared.w.at[stage, half, pl.ds(tile * COLUMNS, COLUMNS)].transpose((1, 0))
                    plgpu.wgmma(total, w, x)
            plgpu.wgmma_wait(plan.halves * tiles)  # for those of the step before

            # The room of the last steps is not used again, so that nobody waits for it.
            @pl.when((step > 0) & (step - 1 + plan.choice.stages < plan.steps))
            def _release() -> None:
                plgpu.barrier_arrive(shared.free.at[_stage(plan, step - 1)])

        return tuple(total[...] for total in sums)

    sums = [plgpu.WGMMAAccumulatorRef((COLUMNS, ROWS), jnp.float32)] * plan.halves
    return pl.run_scoped(multiply, *sums)


def _work(plan: _Plan, column: jax.Array, arrays: _Arrays, shared: _Shared) -> None:
    """From the residual stream to 64 columns of the result."""
    plain, swizzled = _both_views(shared.tokens)
    parts = [arrays.parts.at[i] for i in range(arrays.parts.shape[0])]
    token = added_and_normed(arrays.x, parts, arrays.norms.at[plan.row], eps=plan.eps)
    for span, normed in zip(token.spans, token.normed, strict=True):
        plain[span, 0, :] = normed
    plgpu.commit_smem()

    @pl.when(column == 0)
    def _keep() -> None:
        for span, total in zip(token.spans, token.total, strict=True):
            arrays.total[span] = total

    halves = _product(plan, swizzled, shared)
    result = halves[0]
    if plan.sizes.swiglu:
        result = result / (1.0 + jnp.exp(-result)) * halves[1]
    row = plgpu.broadcasted_iota(jnp.int32, result.shape, 1, layout=plgpu.Layout.WGMMA)
    result = jnp.where(row == 0, result, 0.0).sum(axis=1)
    arrays.out[0, pl.ds(column, COLUMNS)] = result.astype(plan.dtype)


def _kernel(plan: _Plan, arrays: _Arrays, shared: _Shared) -> None:
    let_next_begin()
    column, warpgroup = lax.axis_index("tile") * COLUMNS, lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(partial(_work, plan, column, arrays, shared))
    pl.when(warpgroup == 1)(partial(_load, plan, column, arrays.w, shared))


def _shared_types(plan: _Plan) -> _Shared:
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((ROWS, COLUMNS)), swizzle(128))
    weights = (plan.choice.stages, plan.halves, plan.choice.block_k, COLUMNS)
    tokens = (plan.tiles, ROWS, COLUMNS)
    return _Shared(
        w=plgpu.SMEM(weights, plan.dtype, transforms=swizzled),
        tokens=_one_room(
            plgpu.SMEM(tokens, plan.dtype), plgpu.SMEM(tokens, plan.dtype, transforms=swizzled)
        ),
        full=plgpu.Barrier(num_arrivals=plan.halves, num_barriers=plan.choice.stages),
        free=plgpu.Barrier(num_barriers=plan.choice.stages),
    )


@partial(jax.jit, static_argnames=("row", "eps", "swiglu"))  # one trace, one kernel for all layers
def norm_gemm(
    x: jax.Array,  # [1, D]
    parts: jax.Array,  # [1, D] in x's dtype, or float32[S, 1, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool,
) -> tuple[jax.Array, jax.Array]:  # [1, D], [1, O]
    """See ``norm_gemm.api``."""
    choice = choose(sizes_of(x, w, swiglu=swiglu))
    return launched(choice, x, parts, norms, w, row=row, eps=eps, swiglu=swiglu)


def launched(
    choice: Launch,
    x: jax.Array,  # [1, D]
    parts: jax.Array,  # [1, D] in x's dtype, or float32[S, 1, D]
    norms: jax.Array,  # [W, D]
    w: jax.Array,  # [D, O]; with swiglu [D, 2 * O]: gate, up
    *,
    row: int,
    eps: float,
    swiglu: bool,
) -> tuple[jax.Array, jax.Array]:  # [1, D], [1, O]
    """``norm_gemm`` cut up as ``choice`` says; for it and for tests."""
    sizes = sizes_of(x, w, swiglu=swiglu)
    plan = _Plan(sizes, choice, row, eps, x.dtype)
    token = (plan.tiles, COLUMNS)

    def body(*refs: Ref, **scratch: Ref) -> None:
        _kernel(plan, _Arrays(*refs), _Shared(**scratch))

    total, out = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(token, x.dtype),
            jax.ShapeDtypeStruct((1, sizes.outer), x.dtype),
        ),
        scratch_types=_shared_types(plan)._asdict(),
        grid=(sizes.outer // COLUMNS,),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        # Else all wait before and after each store; none is read before ``commit_smem``.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        kernel_name="norm_gemm",
    )(x.reshape(token), parts.reshape(-1, *token), norms.reshape(-1, *token), w)
    return total.reshape(x.shape), out
