"""The definition of all_reduce, on one device: the sum of split-K partials."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the devices of a mesh axis exchange data: see ``launch``.

    Two calls that use this memory must not run at the same time, and all devices make them in one
    order. XLA runs kernels of a CUDA graph that do not depend on each other at the same time, so
    each call takes ``order`` as if it would write it.
    """

    rank: jax.Array  # int32[1]: this device's number on the axis
    addresses: jax.Array  # int32[2 * N]: low and high half of each device's exchange memory
    order: jax.Ref | None = None  # int32[1]; None if each call depends on the one before it
    # a step without prompts, in which sums by NCCL would divide a CUDA graph
    decodes: bool = field(default=False, metadata=STATIC)

    def ordered(self) -> Peers:
        """The same with ``order``."""
        made = self.order is None
        return replace(self, order=jax.new_ref(jnp.zeros(1, jnp.int32))) if made else self


type PeerArrays = tuple[jax.Array, jax.Array, jax.Ref]


def peer_arrays(peers: Peers | None, axis: str | None) -> PeerArrays:
    """Rank, addresses and order as arguments of a kernel, which on one device uses none of them."""
    if peers is None or axis is None:
        peers = Peers(rank=jnp.zeros(1, jnp.int32), addresses=jnp.zeros(2, jnp.int32))
    order = peers.ordered().order
    assert order is not None
    return peers.rank, peers.addresses, order


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
