"""The definition of all_reduce, on one device: the sum of split-K partials."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the devices of a mesh axis exchange data: see ``launch``."""

    rank: jax.Array  # int32[1]: this device's number on the axis
    addresses: jax.Array  # int32[2 * N]: low and high half of each device's exchange memory


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AllReduceArgs:
    """The arguments of ``all_reduce``."""

    partials: jax.Array  # [T, D], or split-K partials float32[S, T, D]
    peers: Peers | None = None  # None: the devices have no exchange memory
    axis: str | None = field(default=None, metadata=STATIC)  # of the mesh; None: one device


def all_reduce(args: AllReduceArgs) -> jax.Array:  # [T, D] or float32[1, T, D]
    """See ``all_reduce.api``."""
    partials = args.partials
    return partials if partials.ndim == 2 else partials.sum(0, keepdims=True)
