"""The definition of all_reduce_norm, on one device: the definitions of its two ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax

from pallas_kernels.all_reduce.ref import AllReduceArgs, Peers
from pallas_kernels.all_reduce.ref import all_reduce as sum_ref
from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.residual_norm.ref import NormArgs, residual_norm

type Pair = tuple[jax.Array, jax.Array]  # the sum and its norm, [T, D] each


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AllReduceNormArgs:
    """The arguments of ``all_reduce_norm``; ``before_gemm``: a GEMM of the norm is next."""

    norm: NormArgs  # its partials are what this device adds
    peers: Peers | None = None  # None: the devices have no exchange memory
    axis: str | None = field(default=None, metadata=STATIC)  # of the mesh; None: one device
    before_gemm: bool = field(default=True, metadata=STATIC)
    pins: Pins = field(default=NO_PINS, metadata=STATIC)

    @property
    def partials(self) -> jax.Array:  # [T, D] or float32[S, T, D]
        """This device's addend."""
        assert self.norm.partials is not None, "there is a sum"
        return self.norm.partials

    @property
    def sum(self) -> AllReduceArgs:
        """The arguments of the sum over the devices."""
        return AllReduceArgs(partials=self.partials, peers=self.peers, axis=self.axis)

    def after(self, total: jax.Array) -> NormArgs:  # [T, D] or float32[1, T, D]
        """The arguments of the norm after the sum."""
        return replace(self.norm, partials=total)


def in_turn(
    args: AllReduceNormArgs,
    sum_over_devices: Callable[[AllReduceArgs], jax.Array],
    norm: Callable[[NormArgs], Pair],
) -> Pair:
    """The sum over the devices, then the norm."""
    return norm(args.after(sum_over_devices(args.sum)))


def all_reduce_norm(args: AllReduceNormArgs) -> Pair:
    """See ``all_reduce_norm.api``."""
    return in_turn(args, sum_ref, residual_norm)
