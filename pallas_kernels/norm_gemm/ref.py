"""The definition of norm_gemm: the definitions of its two ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.harness.registry import STATIC
from pallas_kernels.lib.arrangements import of_either_order
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm import ref as quantised_ref
from pallas_kernels.quantised_gemm.fp8 import tokens
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.residual_norm.ref import NormArgs, residual_norm
from pallas_kernels.skinny_gemm import ref as gemm_ref
from pallas_kernels.skinny_gemm.ref import GemmArgs

type Pair = tuple[jax.Array, jax.Array]  # the sum [T, D], and the result [T, O]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NormGemmArgs:
    """The arguments of ``norm_gemm``."""

    norm: NormArgs
    w: jax.Array | Quantised  # [D, O], or of O outputs; with swiglu of 2 * O: gate, up
    bias: jax.Array | None = None  # [O]; not with swiglu
    swiglu: bool = field(default=False, metadata=STATIC)
    gelu: bool = field(default=False, metadata=STATIC)  # with swiglu and dense weights, as there
    pins: Pins = field(default=NO_PINS, metadata=STATIC)

    @property
    def num_outputs(self) -> int:
        """O."""
        columns = self.w.num_outputs if isinstance(self.w, Quantised) else self.w.shape[1]
        return columns // (1 + self.swiglu)

    def gemm(self, x: jax.Array) -> Any:  # [T, D]
        """The arguments of the GEMM of the normed tokens: ``GemmArgs``, or those of a quantised
        matrix.
        """
        if isinstance(self.w, Quantised):
            return QuantisedGemmArgs(x=x, w=self.w, bias=self.bias, swiglu=self.swiglu)
        return GemmArgs(x=x, w=self.w, bias=self.bias, swiglu=self.swiglu, gelu=self.gelu)


def in_turn(
    args: NormGemmArgs,
    norm: Callable[[NormArgs], Pair],
    dense: Callable[[GemmArgs], jax.Array],
    quantised: Callable[[QuantisedGemmArgs], jax.Array],
) -> Pair:
    """The norm, then the GEMM for the form of the weights."""
    total, normed = norm(args.norm)
    gemm: Any = quantised if isinstance(args.w, Quantised) else dense
    return total, gemm(args.gemm(normed))


def norm_gemm(args: NormGemmArgs) -> Pair:
    """See ``norm_gemm.api``."""
    quantised = of_either_order(quantised_ref.quantised_gemm)
    return in_turn(args, residual_norm, gemm_ref.skinny_gemm, quantised)


def norm_gemm_fp8(args: NormGemmArgs) -> Pair:
    """The definition where the normed token is quantised, too."""
    return in_turn(args, residual_norm, gemm_ref.skinny_gemm, tokens.quantised_gemm)
