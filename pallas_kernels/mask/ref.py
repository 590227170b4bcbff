"""The definition of mask, without its reads of the board."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.harness.registry import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MaskArgs:
    """The arguments of ``mask``."""

    logits: jax.Array  # float32[B, V]
    finite: jax.Array  # int32[B]: computed from the logits, and so before they are overwritten
    wanted: jax.Array  # int32[B]: 0 for rows without a mask
    slots: jax.Array  # int32[B]: the row's place on the board
    place: jax.Array  # int32[3]
    num_slots: int = field(metadata=STATIC)  # S


def mask(args: MaskArgs) -> tuple[jax.Array, jax.Array]:  # float32[B, V], int32[B]
    """See ``mask.api``; it masks nothing, so rows that want a mask do not get it in time."""
    return args.logits, (args.wanted == 0).astype(jnp.int32)
