"""The definition of quantised_mlp: both matmuls by the definition of quantised_gemm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.arrangements import of_either_order
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm import ref
from pallas_kernels.quantised_gemm.fp8 import tokens
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MlpArgs:
    """The arguments of ``quantised_mlp``."""

    x: jax.Array  # [T, D]
    gate_up: Quantised  # of D inputs and 2 * F outputs: gate, up
    down: Quantised  # of F inputs
    split: bool = field(default=False, metadata=STATIC)
    pins: Pins = field(default=NO_PINS, metadata=STATIC)

    @property
    def first(self) -> QuantisedGemmArgs:
        """The arguments of the first matmul."""
        return QuantisedGemmArgs(x=self.x, w=self.gate_up, swiglu=True)

    def second(self, hidden: jax.Array) -> QuantisedGemmArgs:  # [T, F]
        """The arguments of the second matmul."""
        return QuantisedGemmArgs(x=hidden, w=self.down, split=self.split)


def in_turn(
    args: MlpArgs, gemm: Callable[[QuantisedGemmArgs], jax.Array]
) -> jax.Array:  # [T, D]; with split possibly float32[S, T, D]
    """Both matmuls by ``gemm``."""
    return gemm(args.second(gemm(args.first)))


def quantised_mlp(args: MlpArgs) -> jax.Array:  # [T, D]
    """See ``quantised_mlp.api``."""
    return in_turn(args, of_either_order(ref.quantised_gemm))


def quantised_mlp_fp8(args: MlpArgs) -> jax.Array:  # [T, D]
    """The definition where tokens and hidden values are quantised, too; these from float32."""
    wide = replace(args, x=jnp.asarray(args.x).astype(jnp.float32))
    return in_turn(wide, tokens.quantised_gemm).astype(args.x.dtype)
