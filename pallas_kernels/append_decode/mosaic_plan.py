"""What the Mosaic kernel of append_decode knows and holds: sizes, memory, and what is whose.

Owns: ``Plan``, ``Arrays``, ``Shared``, ``Span``.
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

from pallas_kernels.append_decode.mosaic_launch import GROUP, Launch

LANES = 32  # of a warp

type Ref = Any


@dataclass(frozen=True)
class Plan:
    """What is known when the kernel is compiled."""

    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    dtype: jnp.dtype
    scale: float  # of scores, log2(e) included
    eps: float
    items: int  # rows times kv heads
    choice: Launch

    @property
    def programs(self) -> int:
        """Programs, or clusters of splits, of the grid."""
        return min(self.choice.programs, self.items)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.choice.block // self.page_size

    @property
    def box(self) -> int:
        """Heads of one copy, which must divide those of a row."""
        return math.gcd(GROUP, self.num_heads + 2 * self.num_kv_heads)

    @property
    def copies(self) -> int:
        """Copies of a group's queries."""
        return -(-self.group // self.box)

    @property
    def halves(self) -> tuple[Any, Any]:
        """Slices of a head that are turned with one another."""
        half = self.head_dim // 2
        return pl.ds(0, half), pl.ds(half, half)

    @property
    def layout(self) -> Any:
        """How threads hold a half of each head, [GROUP, H / 2]: a warp has two heads."""
        half = self.head_dim // 2
        tiles = plgpu.Tiling(((GROUP, half), (GROUP // 4, half), (half // LANES,)))
        return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1)


class Arrays(NamedTuple):
    """What lies in global memory."""

    qkv: Ref  # [B, N + 2K, H]
    k_pages: Ref  # [P, S, K, H]
    v_pages: Ref  # [P, S, K, H]
    page_table: Ref  # int32[B, M]
    seq_lens: Ref  # int32[B]
    cos: Ref | None  # float32[B, H / 2]
    sin: Ref | None  # float32[B, H / 2]
    qk_norms: Ref | None  # [2, H]
    out: Ref  # [B, N, H]


class Shared(NamedTuple):
    """Shared memory of a program, and the barriers that say what is in it."""

    k: Ref  # [stages, block, H]
    v: Ref  # [stages, block, H]
    q: Ref  # [GROUP, H], turned
    weights: Ref  # [GROUP, block]
    heads: Ref  # [GROUP, H], not swizzled: queries as they come, turned, then results
    # [1, H]: the new key, turned. Were it a row of several, Mosaic would have TMA swizzle each 64
    # components by themselves, and registers are stored otherwise (jax 0.11.2, H200).
    key: Ref
    value: Ref  # [1, H]: the new one
    score: Ref  # float32[GROUP]: of the new key
    k_full: Ref  # [stages]: one arrival a page
    v_full: Ref  # [stages]: one arrival a page
    k_free: Ref  # [stages]
    v_free: Ref  # [stages]
    heads_full: Ref  # queries and the new value
    mixed: Ref = None  # float32[H, GROUP]: a split's sums, for another to read
    top: Ref = None  # float32[GROUP]: its top scores
    total: Ref = None  # float32[GROUP]: its total weights
    cluster: Ref = None  # one arrival of each split


class Span(NamedTuple):
    """What a program attends to at a time; int32 scalars."""

    row: jax.Array
    kv_head: jax.Array
    split: jax.Array
    length: jax.Array  # 0 for padding, which takes part as a row of one token and yields zeros
    last: jax.Array  # position of the new token: so many keys are in pages
    steps: jax.Array  # blocks that are this program's: number ``split`` and every splits-th on
    before: jax.Array  # steps of the program's earlier spans: stages go round across them


def turns_of(plan: Plan) -> jax.Array:
    """How many rows and kv heads the program takes in turn."""
    return lax.div(plan.items - 1 - lax.axis_index("program"), jnp.int32(plan.programs)) + 1


def place_of(plan: Plan, turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row, kv head and split of a program's turn."""
    item = lax.axis_index("program") + turn * plan.programs
    split = lax.axis_index("split") if plan.choice.splits > 1 else jnp.int32(0)
    heads = jnp.int32(plan.num_kv_heads)
    return lax.div(item, heads), lax.rem(item, heads), split


def span_of(plan: Plan, place: tuple[jax.Array, ...], length: jax.Array, before: jax.Array) -> Span:
    """What lies at a place, in a row of that length."""
    choice, (row, kv_head, split) = plan.choice, place
    last = jnp.maximum(length - 1, 0)
    blocks = lax.div(last + (choice.block - 1), jnp.int32(choice.block))
    steps = lax.div(blocks - split + (choice.splits - 1), jnp.int32(choice.splits))
    return Span(row, kv_head, split, length, last, steps, before)


def stage_of(plan: Plan, step: jax.Array | int) -> jax.Array:
    """Where the block of a step lies in shared memory; steps count from a program's first."""
    return lax.rem(jnp.int32(step), jnp.int32(plan.choice.stages))


def shared_types(plan: Plan) -> dict[str, Any]:
    """``Shared``, as a kernel asks for it."""
    choice, dtype, h = plan.choice, plan.dtype, plan.head_dim
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    swizzled = (tiling((8, 64)), swizzle(128))
    blocks = plgpu.SMEM((choice.stages, choice.block, h), dtype, transforms=swizzled)
    pages = plgpu.Barrier(num_arrivals=plan.pages, num_barriers=choice.stages)
    free = plgpu.Barrier(num_barriers=choice.stages)
    types = {
        "k": blocks,
        "v": blocks,
        "q": plgpu.SMEM((GROUP, h), dtype, transforms=swizzled),
        "weights": plgpu.SMEM((GROUP, choice.block), dtype, transforms=swizzled),
        "heads": plgpu.SMEM((GROUP, h), dtype),
        "key": plgpu.SMEM((1, h), dtype),
        "value": plgpu.SMEM((1, h), dtype),
        "score": plgpu.SMEM((GROUP,), jnp.float32),
        "k_full": pages,
        "v_full": pages,
        "k_free": free,
        "v_free": free,
        "heads_full": plgpu.Barrier(num_arrivals=plan.copies + 1),
    }
    if choice.splits > 1:
        types |= {
            "mixed": plgpu.SMEM((h, GROUP), jnp.float32),
            "top": plgpu.SMEM((GROUP,), jnp.float32),
            "total": plgpu.SMEM((GROUP,), jnp.float32),
            "cluster": plgpu.ClusterBarrier(collective_axes=("split",)),
        }
    return types
