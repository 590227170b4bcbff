"""The definition of all_gather, on one device, which has all columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from pallas_kernels.all_reduce.ref import Peers
from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AllGatherArgs:
    """The arguments of ``all_gather``."""

    x: jax.Array  # [T, W]: this device's columns
    columns: int = field(metadata=STATIC)  # C: those of the result
    peers: Peers | None = None  # None: the devices have no exchange memory
    axis: str | None = field(default=None, metadata=STATIC)  # of the mesh; None: one device


def all_gather(args: AllGatherArgs) -> jax.Array:  # [T, C]
    """See ``all_gather.api``."""
    return args.x[:, : args.columns]
