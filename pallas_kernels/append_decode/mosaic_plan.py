"""Static description of the Mosaic kernel of append_decode: constants, memory, work items.

Owns: ``DecodeSpec``, ``GmemRefs``, ``DecodeScratch``, ``WorkItem``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.append_decode.mosaic_launch import MosaicConfig, group_tile

LANES = 32  # of a warp
WARPS = 4  # of a warpgroup

type Ref = Any


@dataclass(frozen=True)
class DecodeSpec:
    """Compile-time constants of the kernel."""

    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    dtype: jnp.dtype
    scale: float  # of scores, times log2(e)
    eps: float
    window: int | None
    norm_value: bool  # the new value has a norm without weights
    num_items: int  # rows times kv heads
    config: MosaicConfig

    @property
    def clusters(self) -> int:
        """Clusters of ``splits`` CTAs in the grid."""
        return min(self.config.max_clusters, self.num_items)

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def group_tile(self) -> int:
        """Query heads per kv head, with the padding: N of a wgmma."""
        return group_tile(self.num_heads, self.num_kv_heads)

    @property
    def pages_per_block(self) -> int:
        """Pages per block of keys."""
        return self.config.block // self.page_size

    @property
    def heads_per_copy(self) -> int:
        """Heads per TMA copy, which must divide the heads of a row."""
        return math.gcd(self.group_tile, self.num_heads + 2 * self.num_kv_heads)

    @property
    def num_copies(self) -> int:
        """TMA copies for the queries of a group."""
        return -(-self.group // self.heads_per_copy)

    @property
    def halves(self) -> tuple[Any, Any]:
        """Slices of the two halves of a head that rope rotates with each other."""
        half = self.head_dim // 2
        return pl.ds(0, half), pl.ds(half, half)

    @property
    def half_layout(self) -> Any:
        """Register layout of one half of each head, [group_tile, H / 2]: each warp has a quarter of
        the heads.
        """
        heads, half = self.group_tile, self.head_dim // 2
        tiles = plgpu.Tiling(((heads, half), (heads // WARPS, half), (half // LANES,)))
        return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)


class GmemRefs(NamedTuple):
    """Refs to the arrays in global memory."""

    qkv: Ref  # [B, N + 2K, H]
    k_pages: Ref  # [P, S, K, H]
    v_pages: Ref  # [P, S, K, H]
    page_table: Ref  # int32[B, M]
    seq_lens: Ref  # int32[B]
    cos: Ref | None  # float32[B, H / 2]
    sin: Ref | None  # float32[B, H / 2]
    qk_norms: Ref | None  # [2, H]
    sinks: Ref | None  # [K, group_tile]
    out: Ref  # [B, N, H]


class DecodeScratch(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their allocation.

    ``acc_smem``, ``m_smem``, ``l_smem`` and ``cluster_barrier`` are None without splits.
    """

    cluster_barrier: Ref  # one arrival per CTA; after SMEM JAX's interpreter would deadlock on it
    heads_smem: Ref  # [group_tile, H], not swizzled: queries, then rotated queries, then results
    k_smem: Ref  # [stages, block, H]
    # [1, H]: the new key, rotated. As a row of a larger buffer Mosaic would have TMA swizzle each
    # 64 components by themselves, unlike the stores from registers (jax 0.11.2, H200).
    new_k_smem: Ref
    acc_smem: Ref  # float32[H, group_tile]: acc of a split, read by the first CTA
    q_smem: Ref  # [group_tile, H], rotated
    new_score_smem: Ref  # float32[group_tile]: scores of the new key
    m_smem: Ref  # float32[group_tile]: m_i of a split
    l_smem: Ref  # float32[group_tile]: l_i of a split
    v_smem: Ref  # [stages, block, H]
    new_v_smem: Ref  # [1, H]
    p_smem: Ref  # [group_tile, block]
    heads_barrier: Ref  # queries, and the new value if it is copied as it is
    k_consumed_barriers: Ref  # [stages]
    k_barriers: Ref  # [stages]: one arrival per page
    v_consumed_barriers: Ref  # [stages]
    v_barriers: Ref  # [stages]: one arrival per page


class WorkItem(NamedTuple):
    """A row and kv head, and the CTA's split of its keys; int32 scalars.

    Blocks are counted from the first key of ``first_page``.
    """

    row: jax.Array
    kv_head: jax.Array
    split: jax.Array
    length: jax.Array  # 0 for padding, which is computed as a row of one token and yields zeros
    new_position: jax.Array  # position of the new token
    first_page: jax.Array | int  # the column of the page in which the window begins
    num_hidden: jax.Array | int  # keys of that page before the window
    num_keys: jax.Array  # in pages, from the first page on; the new token is not among them
    num_steps: jax.Array  # blocks of this CTA: number ``split`` and every splits-th from there
    first_step: jax.Array  # steps of the CTA's earlier items; pipeline stages continue across them


def num_cta_items(spec: DecodeSpec) -> jax.Array:
    """Number of work items of the CTA."""
    return lax.div(spec.num_items - 1 - lax.axis_index("cluster"), jnp.int32(spec.clusters)) + 1


def item_index(spec: DecodeSpec, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, kv head and split of the CTA's i-th work item."""
    item = lax.axis_index("cluster") + i * spec.clusters
    split = lax.axis_index("split") if spec.config.splits > 1 else jnp.int32(0)
    heads = jnp.int32(spec.num_kv_heads)
    return lax.div(item, heads), lax.rem(item, heads), split


def work_item(
    spec: DecodeSpec, index: tuple[jax.Array, ...], length: jax.Array, first_step: jax.Array
) -> WorkItem:
    """The work item at an ``item_index``, for a row of that length."""
    config, (row, kv_head, split) = spec.config, index
    new_position = jnp.maximum(length - 1, 0)
    first_page, num_hidden, num_keys = _keys_in_pages(spec, new_position)
    blocks = lax.div(num_keys + (config.block - 1), jnp.int32(config.block))
    num_steps = lax.div(blocks - split + (config.splits - 1), jnp.int32(config.splits))
    keys = (first_page, num_hidden, num_keys)
    return WorkItem(row, kv_head, split, length, new_position, *keys, num_steps, first_step)


def _keys_in_pages(
    spec: DecodeSpec, new_position: jax.Array
) -> tuple[jax.Array | int, jax.Array | int, jax.Array]:
    """``first_page``, ``num_hidden`` and ``num_keys`` of a row.

    A page is no larger than a block, so every block has a visible key.
    """
    if spec.window is None:
        return 0, 0, new_position
    oldest = jnp.maximum(new_position + 1 - spec.window, 0)
    first_page = lax.div(oldest, jnp.int32(spec.page_size))
    start = first_page * spec.page_size
    # A window of one token has no key in the pages.
    num_keys = jnp.where(oldest < new_position, new_position - start, 0)
    return first_page, oldest - start, num_keys


def stage_index(spec: DecodeSpec, step: jax.Array | int) -> jax.Array:
    """Pipeline stage of a step; steps are counted across the CTA's work items."""
    return lax.rem(jnp.int32(step), jnp.int32(spec.config.stages))


def scratch_types(spec: DecodeSpec) -> DecodeScratch:
    """The types of the scratch memory, for ``plgpu.kernel``."""
    config, dtype, h, heads = spec.config, spec.dtype, spec.head_dim, spec.group_tile
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    blocks = plgpu.SMEM((config.stages, config.block, h), dtype, transforms=swizzled)
    per_head = plgpu.SMEM((heads,), jnp.float32)
    barriers = plgpu.Barrier(num_arrivals=spec.pages_per_block, num_barriers=config.stages)
    consumed_barriers = plgpu.Barrier(num_barriers=config.stages)
    is_split = config.splits > 1
    return DecodeScratch(
        heads_smem=plgpu.SMEM((heads, h), dtype),
        k_smem=blocks,
        new_k_smem=plgpu.SMEM((1, h), dtype),
        acc_smem=plgpu.SMEM((h, heads), jnp.float32) if is_split else None,
        q_smem=plgpu.SMEM((heads, h), dtype, transforms=swizzled),
        new_score_smem=per_head,
        m_smem=per_head if is_split else None,
        l_smem=per_head if is_split else None,
        v_smem=blocks,
        new_v_smem=plgpu.SMEM((1, h), dtype),
        p_smem=plgpu.SMEM((heads, config.block), dtype, transforms=swizzled),
        cluster_barrier=plgpu.ClusterBarrier(collective_axes=("split",)) if is_split else None,
        heads_barrier=plgpu.Barrier(num_arrivals=spec.num_copies + (not spec.norm_value)),
        k_consumed_barriers=consumed_barriers,
        k_barriers=barriers,
        v_consumed_barriers=consumed_barriers,
        v_barriers=barriers,
    )
