"""sandwich_norm as several kernels: plain XLA, and ``residual_norm`` for each norm."""

from __future__ import annotations

import jax

from pallas_kernels.residual_norm import xla
from pallas_kernels.residual_norm.api import residual_norm
from pallas_kernels.sandwich_norm.ref import Normed, SandwichArgs, by_norms


@jax.jit  # one trace serves every layer of a step
def plain_xla(args: SandwichArgs) -> Normed:
    """In plain XLA; supports differentiation and vmap."""
    return by_norms(args, xla.residual_norm)


def unfused(args: SandwichArgs) -> Normed:
    """Each norm in the implementation that ``pins`` or ``registry.select`` chooses."""
    pinned = args.pins.of("residual_norm")
    return by_norms(args, lambda norm: residual_norm(norm, pinned))
