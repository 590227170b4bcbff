"""fp8 GEMM of a few quantised tokens in Pallas Mosaic GPU.

The kernel of ``skinny_gemm`` with 8-bit operands: M of a wgmma is 64 outputs, N the tokens. The
tensor cores add fp8 products with about 14 bits, so each group of 128 inputs has an accumulator of
its own, which is scaled and added to the float32 sum in registers.

With 1, 8 or 16 tokens the kernel can quantise them itself (``DecodeConfig.quantises``): each CTA
those inputs that it multiplies, while its first weights are in flight. That saves a launch. For one
token it can add and normalise it before (``launch_normed``), which saves another.
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

from pallas_kernels.gemm.epilogues import (
    load_bias,
    plus_bias,
    swiglu,
    write_columns,
    write_rows,
)
from pallas_kernels.gemm.pipeline import Ring, copy_steps, divide_roles, launch
from pallas_kernels.gemm.scratch import Scratch, smem, stage_barriers
from pallas_kernels.gemm.tiles import SplitTile, split_tile
from pallas_kernels.lib.pdl import grid_dependency_wait, launch_dependents
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm.fp8.launch import (
    MMA_ROWS,
    MMA_TOKENS,
    DecodeConfig,
    Fp8Sizes,
    result_shape,
)
from pallas_kernels.quantised_gemm.fp8.quantise import (
    GROUPS_LAYOUT,
    ROWS,
    TOKENS_LAYOUT,
    quantised_groups,
)
from pallas_kernels.quantised_gemm.fp8.tokens import GROUP
from pallas_kernels.residual_norm import token
from pallas_kernels.residual_norm.ref import NormArgs

SCALE_LANES = 32  # float32 values in 128 bytes, to which TMA aligns arrays in shared memory

LOADS_IN_FLIGHT = 8  # of a thread that quantises tokens, 16 bytes each

type Ref = Any


@dataclass(frozen=True)
class _Spec:
    """Compile-time constants of the kernel."""

    sizes: Fp8Sizes
    config: DecodeConfig
    norm: token.Norm | None = None  # of the only token, if the kernel computes it

    @property
    def halves(self) -> int:
        """2 with swiglu (gate and up), else 1."""
        return 1 + self.sizes.swiglu

    @property
    def token_rows(self) -> int:
        """Rows of ``x_smem``: the tokens, padded."""
        return max(self.sizes.tokens, MMA_TOKENS)

    @property
    def scale_row(self) -> int:
        """Scales of a group in shared memory: of the tokens, padded to 128 bytes for TMA."""
        return -(-self.token_rows // SCALE_LANES) * SCALE_LANES

    @property
    def token_steps(self) -> int:
        """K steps whose tokens are in shared memory: those of a CTA if it quantises them."""
        config = self.config
        if config.quantises:
            return -(-self.sizes.groups // config.step_groups // config.split_k)
        return config.stages

    @property
    def row_union(self) -> bool:
        """True if ``x_smem`` has a plain view for the only token."""
        return self.config.quantises and self.sizes.tokens == 1

    @property
    def block_k(self) -> int:
        """Inputs of a K step."""
        return self.config.step_groups * GROUP


class _Gmem(NamedTuple):
    """Refs to the arrays in global memory."""

    x: Ref  # e4m3[T, K]; [T, K / GROUP, GROUP] if the kernel quantises it; with a norm ``NormRefs``
    x_scales: Ref  # [K / GROUP, T or more]; None if the kernel quantises
    w: Ref  # e4m3[O, K]; with swiglu [2 * O, K]
    w_scales: Ref  # [O], or [O / GROUP, K / GROUP]
    bias: Ref  # [O], or None
    total: Ref = None  # the sum of a normed token
    out: Ref = None  # [T, O], or of this CTA's split


def _tokens(spec: _Spec, scratch: Scratch) -> Ref:
    """The swizzled tokens in shared memory."""
    return token.views(scratch.x_smem)[1] if spec.row_union else scratch.x_smem


def _memory_warpgroup(
    spec: _Spec, tile: SplitTile, gmem: _Gmem, ring: Ring, scratch: Scratch
) -> None:
    """Copy the K steps; the tokens unless the compute warpgroup quantises them."""
    step_groups = spec.config.step_groups

    def copy_weights(step: jax.Array) -> None:
        stage = ring.stage(step)
        inner = pl.ds((tile.first_step + step) * spec.block_k, spec.block_k)
        for half in range(spec.halves):
            rows = pl.ds(half * spec.sizes.outer + tile.output, spec.config.block_o)
            w_smem, barrier = scratch.w_smem.at[stage, half], ring.barriers.at[stage]
            plgpu.copy_gmem_to_smem(gmem.w.at[rows, inner], w_smem, barrier)

    def copy_tokens(step: jax.Array) -> None:
        stage, rows = ring.stage(step), pl.ds(0, spec.token_rows)
        first = (tile.first_step + step) * step_groups
        barrier = ring.barriers.at[stage]
        # TMA fills missing tokens and scales with zeros.
        places = [stage * step_groups + i for i in range(step_groups)]
        for i, place in enumerate(places):
            tokens = gmem.x.at[rows, pl.ds((first + i) * GROUP, GROUP)]
            plgpu.copy_gmem_to_smem(tokens, scratch.x_smem.at[place], barrier)
        scales = gmem.x_scales.at[pl.ds(first, step_groups), pl.ds(0, spec.scale_row)]
        target = scratch.scales_smem.at[pl.ds(places[0], step_groups)]
        plgpu.copy_gmem_to_smem(scales, target, barrier)

    copy_steps(ring, tile.num_steps, copy_weights, None if spec.config.quantises else copy_tokens)


def _quantise_token(spec: _Spec, tile: SplitTile, x: Ref, scratch: Scratch) -> None:
    """Quantise the CTA's inputs of the only token, four groups at once."""
    step_groups, plain = spec.config.step_groups, token.views(scratch.x_smem)[0]
    num_groups, spans = tile.num_steps * step_groups, -(-spec.token_steps * step_groups // ROWS)
    # The last spans may overlap; all write the same.
    firsts = [jnp.minimum(i * ROWS, num_groups - ROWS) for i in range(spans)]
    start = tile.first_step * step_groups
    loaded = [
        plgpu.load(x.at[0, pl.ds(start + first, ROWS)], layout=GROUPS_LAYOUT, optimized=False)
        for first in firsts
    ]
    for first, groups in zip(firsts, loaded, strict=True):
        values, scales = quantised_groups(groups)
        plain[pl.ds(first, ROWS), 0] = values
        scratch.scales_smem[pl.ds(first, ROWS)] = scales


def _quantise_normed(norm: token.Norm, first: jax.Array, gmem: _Gmem, scratch: Scratch) -> None:
    """Add, normalise and quantise the only token; the ``first`` CTA also writes the sum."""
    found, plain = token.normed_token(norm, gmem.x), token.views(scratch.x_smem)[0]
    for span, groups in zip(found.spans, found.normed, strict=True):
        values, scales = quantised_groups(groups)
        plain[span, 0] = values
        scratch.scales_smem[span] = scales
    pl.when(first)(partial(token.write_total, found, gmem.total))


def _quantise_tokens(spec: _Spec, tile: SplitTile, x: Ref, scratch: Scratch) -> None:
    """Quantise the CTA's inputs of all tokens, eight tokens of a group at once."""
    num_groups = tile.num_steps * spec.config.step_groups
    start, most = (
        tile.first_step * spec.config.step_groups,
        spec.token_steps * spec.config.step_groups,
    )
    tokens = range(0, spec.sizes.tokens, MMA_TOKENS)
    places = [(group, pl.ds(token, MMA_TOKENS)) for group in range(most) for token in tokens]
    for batch in range(0, len(places), LOADS_IN_FLIGHT):
        loaded = list[tuple[jax.Array, Any, jax.Array]]()
        for group, rows in places[batch : batch + LOADS_IN_FLIGHT]:
            place = jnp.minimum(group, num_groups - 1)  # a CTA with fewer repeats its last one
            source = x.at[rows, start + place]
            groups = plgpu.load(source, layout=TOKENS_LAYOUT, optimized=False)
            loaded.append((place, rows, groups))
        for place, rows, groups in loaded:
            values, scales = quantised_groups(groups)
            scratch.x_smem[place, rows] = values
            scratch.scales_smem[place, rows] = scales


def _block_scales(
    spec: _Spec, tile: SplitTile, gmem: _Gmem, step: jax.Array
) -> list[list[jax.Array]]:  # by group and half
    """The scales of a warpgroup's blocks in a K step; none where rows have scales."""
    if not spec.sizes.blocks:
        return []
    first = (tile.first_step + step) * spec.config.step_groups
    block, half_blocks = lax.div(tile.output, jnp.int32(GROUP)), spec.sizes.outer // GROUP
    return [
        [gmem.w_scales[half * half_blocks + block, first + i] for half in range(spec.halves)]
        for i in range(spec.config.step_groups)
    ]


def _row_scales(spec: _Spec, tile: SplitTile, gmem: _Gmem) -> list[jax.Array]:  # by half
    """The scales of a warpgroup's rows; none where blocks have scales."""
    if spec.sizes.blocks:
        return []
    firsts = [half * spec.sizes.outer + tile.output for half in range(spec.halves)]
    layout = plgpu.Layout.WGMMA.reduce(1)
    return [
        plgpu.load(gmem.w_scales.at[pl.ds(first, MMA_ROWS)], layout=layout, optimized=False)
        for first in firsts
    ]


def _token_scales(spec: _Spec, scratch: Scratch, place: jax.Array, tokens: Any) -> jax.Array:
    """The tokens' scales of a group in shared memory, or the scale of the only token."""
    if spec.row_union:
        return scratch.scales_smem[place]
    row, layout = scratch.scales_smem.at[place, tokens], plgpu.Layout.WGMMA.reduce(0)
    return plgpu.load(row, layout=layout, optimized=False)


def _matmul(
    spec: _Spec,
    tile: SplitTile,
    rows: Any,
    tokens: Any,
    gmem: _Gmem,
    ring: Ring,
    scratch: Scratch,
) -> tuple[jax.Array, ...]:  # float32[MMA_ROWS, tokens], one for each half
    """Sum of the scaled results of the groups; ``rows`` are a warpgroup's of ``w_smem``."""
    step_groups, halves = spec.config.step_groups, spec.halves
    shape, x_smem = (MMA_ROWS, tokens.size), _tokens(spec, scratch)

    def multiply(stage: jax.Array, place: jax.Array, *accs: Ref) -> tuple[jax.Array, ...]:
        for i, acc in enumerate(accs):
            group, half = divmod(i, halves)
            w = scratch.w_smem.at[stage, half, rows, pl.ds(group * GROUP, GROUP)]
            plgpu.wgmma(acc, w, x_smem.at[place + group, tokens].transpose((1, 0)))
        return tuple(acc[...] for acc in accs)

    def step_body(step: jax.Array, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage, sums = ring.stage(step), list(carried)
        place = (step if spec.config.quantises else stage) * step_groups
        blocks = _block_scales(spec, tile, gmem, step)
        plgpu.barrier_wait(ring.barriers.at[stage])
        accs = [plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * (step_groups * halves)
        parts = pl.run_scoped(partial(multiply, stage, place), *accs)
        for group in range(step_groups):
            scales = _token_scales(spec, scratch, place + group, tokens)
            for half in range(halves):
                factor = scales * blocks[group][half] if spec.sizes.blocks else scales
                if not spec.row_union:
                    factor = lax.broadcast_in_dim(factor, shape, [1])
                sums[half] = sums[half] + parts[group * halves + half] * factor

        ring.release_if_reused(stage, step, tile.num_steps)
        return tuple(sums)

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, tile.num_steps, step_body, (zeros,) * halves)


def _compute_warpgroup(
    spec: _Spec,
    tile: SplitTile,
    gmem: _Gmem,
    ring: Ring,
    scratch: Scratch,
    warpgroup: jax.Array,
) -> None:
    """Compute the warpgroup's part of the CTA's results, and write it from registers."""
    out, count = gmem.out, spec.token_rows
    if spec.config.divides_outputs:
        row, tokens = warpgroup * MMA_ROWS, pl.ds(0, count)
    else:
        count //= spec.config.warpgroups
        row, tokens = 0, pl.ds(warpgroup * count, count)
    rows, tile = pl.ds(row, MMA_ROWS), tile._replace(output=tile.output + row)
    outputs = pl.ds(tile.output, MMA_ROWS)
    # Weights, so they are read before earlier kernels have ended, and no result waits for them.
    row_scales, bias = _row_scales(spec, tile, gmem), load_bias(gmem.bias, outputs)
    if spec.norm is not None:
        _quantise_normed(spec.norm, tile.output == 0, gmem, scratch)
        plgpu.commit_smem()
    elif spec.config.quantises:
        grid_dependency_wait()
        quantise = _quantise_token if spec.sizes.tokens == 1 else _quantise_tokens
        quantise(spec, tile, gmem.x, scratch)
        plgpu.commit_smem()
    sums = list(_matmul(spec, tile, rows, tokens, gmem, ring, scratch))
    for half, scales in enumerate(row_scales):
        sums[half] = sums[half] * lax.broadcast_in_dim(scales, sums[half].shape, [0])
    result = swiglu(*sums) if spec.sizes.swiglu else plus_bias(sums[0], bias)
    if spec.sizes.tokens >= MMA_TOKENS:
        return write_columns(out, tokens, outputs, result)
    write_rows(out, spec.sizes.tokens, outputs, result)


def _kernel(spec: _Spec, gmem: _Gmem, results: tuple[Ref, Ref], scratch: Scratch) -> None:
    config, (total, result) = spec.config, results
    launch_dependents()
    tile = split_tile(spec.sizes.groups // config.step_groups, config.split_k, config.block_o)
    ring = Ring(config.stages, scratch.barriers, scratch.consumed_barriers)

    def compute(warpgroup: jax.Array) -> None:
        out = result if config.split_k == 1 else result.at[lax.axis_index("split")]
        _compute_warpgroup(
            spec, tile, gmem._replace(total=total, out=out), ring, scratch, warpgroup
        )

    memory = partial(_memory_warpgroup, spec, tile, gmem, ring, scratch)
    divide_roles(config.warpgroups, memory, compute)


def _scratch_types(spec: _Spec) -> Scratch:
    config = spec.config
    groups = spec.token_steps * config.step_groups
    tokens, scales = (groups, spec.token_rows, GROUP), (groups, spec.scale_row)
    x_smem: Any = smem(tokens, jnp.float8_e4m3fn, GROUP)
    if spec.row_union:
        scales = (groups,)
        x_smem = token.ref_union(plgpu.SMEM(tokens, jnp.float8_e4m3fn), x_smem)
    weights = (config.stages, spec.halves, config.block_o, spec.block_k)
    copies = spec.halves + (0 if config.quantises else 1 + config.step_groups)
    return Scratch(
        w_smem=smem(weights, jnp.float8_e4m3fn, GROUP),
        x_smem=x_smem,
        scales_smem=plgpu.SMEM(scales, jnp.float32),
        **stage_barriers(config.stages, copies, config.warpgroups),
    )


def launch_with(
    config: DecodeConfig,
    sizes: Fp8Sizes,
    x: jax.Array,  # e4m3[T, K]; [T, K] if the kernel quantises it
    x_scales: jax.Array | None,  # float32[K / GROUP, T or more]
    w: jax.Array,  # e4m3[O, K]; with swiglu [2 * O, K]: gate, up
    w_scales: jax.Array,  # float32[O, 1], or [O / GROUP, K / GROUP]
    bias: jax.Array | None = None,  # [O]
) -> jax.Array:  # [T, O], or float32[S, T, O]
    """GEMM of a few tokens. Raises ValueError when the configuration does not fit the call."""
    if not config.fits(sizes) or config.quantises != (x_scales is None):
        raise ValueError(f"{config} does not fit {sizes}")
    if x_scales is None:
        x = x.reshape(sizes.tokens, sizes.groups, GROUP)
    _, out = _launch(_Spec(sizes, config), x, x_scales, w, w_scales, bias)
    return out


def launch_normed(
    config: DecodeConfig,
    sizes: Fp8Sizes,
    norm: NormArgs,
    w: Quantised,
    bias: jax.Array | None,  # [O]
) -> tuple[jax.Array, jax.Array]:  # [1, K], [1, O]
    """The sum of a token and its partials, and the GEMM of its norm; ``config`` quantises."""
    spec = _Spec(sizes, config, token.Norm(norm.row, norm.eps))
    arrays, total_type = token.norm_arrays(norm, GROUP)
    total, out = _launch(spec, arrays, None, w.values, w.scales, bias, total_type)
    return total.reshape(norm.x.shape), out


def _launch(
    spec: _Spec,
    x: jax.Array | token.NormRefs,
    x_scales: jax.Array | None,
    w: jax.Array,
    w_scales: jax.Array,
    bias: jax.Array | None,
    total_type: jax.ShapeDtypeStruct | None = None,
) -> Any:
    """Run the kernel; returns the sum of a normed token, or None, and the result."""
    sizes, config = spec.sizes, spec.config
    return launch(
        "fp8_decode_gemm",
        partial(_kernel, spec),
        _Gmem(x, x_scales, w, w_scales if sizes.blocks else w_scales.reshape(-1), bias),
        out_type=(total_type, result_shape(sizes, config.split_k)),
        scratch=_scratch_types(spec),
        # adjacent CTAs, adjacent outputs
        grid={"split": config.split_k, "tile": sizes.outer // config.block_o},
        warpgroups=config.warpgroups + 1,
        auto_barriers=False,
    )
