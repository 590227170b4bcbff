"""How the warps of a loading warpgroup share the pages of keys and values, in Pallas Mosaic GPU.

Owns: ``Stream`` and ``copied_by_warps``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

READERS = 2  # warps that copy keys, and as many that copy values

type Ref = Any


class Pages(NamedTuple):
    """Keys or values: where they lie, where they go, and the barriers that say what is there."""

    pool: Ref  # [P, S, K, H]
    room: Ref  # [stages, block, H]
    full: Ref  # [stages]
    free: Ref  # [stages]


class Stream(NamedTuple):
    """What one warp copies: its share of the pages of keys or of values."""

    pages: Pages
    own: range  # pages of a block
    is_first: bool  # of the warps


def copied_by_warps(
    keys: Pages, values: Pages, pages_of_block: int, copy: Callable[[Stream], None]
) -> None:
    """Call ``copy`` in each of the warps that copy, with its stream.

    A warp issues a copy without a barrier of its warpgroup, and neither waits for the other's room.
    """
    readers = min(READERS, pages_of_block)

    @plgpu.warp_map
    def _warp(warp: jax.Array) -> None:
        for i, pages in enumerate((keys, values)):
            for share in range(readers):
                own = range(share, pages_of_block, readers)
                stream = Stream(pages, own, is_first=i == share == 0)
                pl.when(warp == i * readers + share)(lambda stream=stream: copy(stream))
