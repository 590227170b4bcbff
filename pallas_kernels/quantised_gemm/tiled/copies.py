"""TMA copies of the K steps of the Hopper kernels of quantised_gemm (``step``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantised_gemm.tiled.arrange import TILE
from pallas_kernels.quantised_gemm.tiled.step import Gmem, Spec

type Ref = Any


def copy_weights(
    spec: Spec,
    gmem: Gmem,
    scratch: Any,
    where: tuple[Any, Any],  # the halves and tiles of outputs
    step: jax.Array,
    stage: jax.Array,
    place: Any = slice(None),  # among the tiles of a stage
) -> None:
    """Issue the copies of a K step's weights and their factors."""
    block_k, barrier = spec.config.block_k, scratch.barriers.at[stage]
    if spec.sizes.super_group:
        return _copy_records(spec, gmem, scratch, where, step, stage, place)
    tiles = pl.ds(step * (block_k // TILE), block_k // TILE)
    values = gmem.values.at[*where, tiles]
    plgpu.copy_gmem_to_smem(values, scratch.values_smem.at[stage, place], barrier)
    for part, smem in zip(gmem.parts, scratch.parts_smem, strict=True):
        if smem is not None:
            first = lax.div(step * block_k, jnp.int32(spec.sizes.group))  # group of the step
            rows = part.at[*where, pl.ds(first, smem.shape[3])]
            plgpu.copy_gmem_to_smem(rows, smem.at[stage, 0, place], barrier)


def _copy_records(
    spec: Spec,
    gmem: Gmem,
    scratch: Any,
    where: tuple[Any, Any],
    step: jax.Array,
    stage: jax.Array,
    place: Any,
) -> None:
    """See ``copy_weights``. A step of a part of a record copies all of its factors."""
    block_k, super_group = spec.config.block_k, spec.sizes.super_group
    values_smem, words_smem = scratch.values_smem, scratch.parts_smem.words
    own = pl.ds(lax.div(step * block_k, jnp.int32(super_group)), words_smem.shape[2])
    rows = values_smem.shape[3]
    first = lax.rem(step, jnp.int32(spec.value_rows // rows)) * rows
    pairs = (
        (pl.ds(first, rows), values_smem),
        (pl.ds(spec.value_rows, words_smem.shape[3]), words_smem),
    )
    for some, smem in pairs:
        source = gmem.values.at[*where, own, some]
        plgpu.copy_gmem_to_smem(source, smem.at[stage, place], scratch.barriers.at[stage])


def copy_sums(
    spec: Spec,
    sums: Ref,  # float32[groups, T], None without offsets
    scratch: Any,
    tokens: Any,  # a slice of T
    step: jax.Array,
    stage: jax.Array,
) -> None:
    """Issue the copy of a K step's sums of inputs, if there are any."""
    if sums is None:
        return
    smem = scratch.sums_given_smem.at[stage]
    first = lax.div(step * spec.config.block_k, jnp.int32(spec.sizes.group))
    rows = sums.at[pl.ds(first, smem.shape[0]), tokens]
    plgpu.copy_gmem_to_smem(rows, smem, scratch.barriers.at[stage])
