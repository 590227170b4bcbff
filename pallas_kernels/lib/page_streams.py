"""Page copies of the memory warpgroup in Pallas Mosaic GPU, divided among its warps.

Owns: ``PagedOperand``, ``PageStream`` and ``for_each_stream``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPS_PER_OPERAND = 2  # two warps copy keys, two copy values

type Ref = Any


class PagedOperand(NamedTuple):
    """Keys or values: their pool, their shared-memory buffer, and its barriers."""

    pool: Ref  # [P, S, K, H], global memory
    smem: Ref  # [stages, block, H]
    barriers: Ref  # [stages]: a block has arrived
    consumed_barriers: Ref  # [stages]: a stage may be overwritten


class PageStream(NamedTuple):
    """The copies of one warp: its share of the pages of keys or of values."""

    operand: PagedOperand
    page_indices: range  # within a block
    is_first: bool  # the first of the four warps


def for_each_stream(
    keys: PagedOperand,
    values: PagedOperand,
    pages_per_block: int,
    copy: Callable[[PageStream], None],
) -> None:
    """Call ``copy`` with its stream in each warp that copies.

    A warp issues its copies without a barrier across the warpgroup, and keys do not wait for a free
    stage of values, nor values for one of keys.
    """
    warps = min(WARPS_PER_OPERAND, pages_per_block)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        for i, operand in enumerate((keys, values)):
            for share in range(warps):
                page_indices = range(share, pages_per_block, warps)
                stream = PageStream(operand, page_indices, is_first=i == share == 0)
                pl.when(warp == i * warps + share)(lambda stream=stream: copy(stream))
