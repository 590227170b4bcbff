"""all_reduce_norm as two ops, one after the other: plain XLA, and each op's best kernel."""

from __future__ import annotations

from pallas_kernels.all_reduce import xla as sum_xla
from pallas_kernels.all_reduce.api import all_reduce
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs, Pair, in_turn
from pallas_kernels.residual_norm import xla as norm_xla
from pallas_kernels.residual_norm.api import residual_norm


def plain_xla(args: AllReduceNormArgs) -> Pair:
    """Both ops in plain XLA."""
    return in_turn(args, sum_xla.all_reduce, norm_xla.residual_norm)


def unfused(args: AllReduceNormArgs) -> Pair:
    """Each op in the implementation that ``pins`` or ``registry.select`` chooses."""
    pinned = args.pins.of
    return in_turn(
        args,
        lambda own: all_reduce(own, pinned("all_reduce")),
        lambda own: residual_norm(own, pinned("residual_norm")),
    )
