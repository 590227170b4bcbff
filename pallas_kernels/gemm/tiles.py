"""The tiles of a GEMM's result: one for each CTA, or tile after tile of a persistent one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lib.device import current_device


class Tile(NamedTuple):
    """Position of a persistent CTA's tile; int32 scalars."""

    token: jax.Array  # the first one
    output: jax.Array  # the first one, or the pair of tiles of weights
    first_step: jax.Array  # among all K steps of the CTA


class SplitTile(NamedTuple):
    """Outputs and K range of a CTA with one tile; int32 scalars."""

    output: jax.Array  # the first one
    first_step: jax.Array  # counted from the start of the inner axis
    num_steps: jax.Array


def split_range(steps: int, split_k: int) -> tuple[jax.Array, jax.Array]:
    """The first of a CTA's K steps and their end, where CTAs divide the inner axis."""
    split = lax.axis_index("split")
    first = lax.div(split * steps, jnp.int32(split_k))
    return first, lax.div((split + 1) * steps, jnp.int32(split_k))


def split_tile(steps: int, split_k: int, outputs: int) -> SplitTile:
    """The CTA's part of so many K steps, and its tile of so many ``outputs``."""
    first, end = split_range(steps, split_k)
    return SplitTile(lax.axis_index("tile") * outputs, first, end - first)


def resident_ctas(items: int, cluster: int = 1) -> int:
    """Number of resident clusters of a persistent kernel."""
    return min(current_device().num_sms // cluster, items)


@dataclass(frozen=True)
class TileGrid:
    """The tiles of a call, which resident clusters of CTAs compute round-robin."""

    along: tuple[int, int]  # tokens and outputs; the last tiles may extend past the end
    group: int  # adjacent tiles along the tokens that are computed at the same time
    cluster: int = 1  # CTAs

    @property
    def num_tiles(self) -> int:
        """Cluster tiles of the call."""
        return self.along[0] * self.along[1]

    @property
    def clusters(self) -> int:
        """Number of resident clusters."""
        return resident_ctas(self.num_tiles, self.cluster)

    def tiles_of_cta(self) -> jax.Array:
        """Number of tiles that the CTA computes."""
        return lax.div(self.num_tiles - 1 - lax.axis_index("cluster"), jnp.int32(self.clusters)) + 1

    def at(self, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The place of the cluster's i-th tile along tokens and outputs.

        The tiles of all clusters at the same i form a compact region.
        """
        index = i * self.clusters + lax.axis_index("cluster")
        return plgpu.planar_snake(index, self.along, 0, self.group)
