"""norm_gemm as two ops, one after the other: plain XLA, and each op's best kernel."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels.lib.arrangements import of_either_order
from pallas_kernels.norm_gemm.ref import NormGemmArgs, Pair, in_turn
from pallas_kernels.quantised_gemm import xla as quantised_xla
from pallas_kernels.quantised_gemm.api import chosen_definition, quantised_gemm
from pallas_kernels.residual_norm import ref as norm_ref
from pallas_kernels.residual_norm import xla as norm_xla
from pallas_kernels.residual_norm.api import residual_norm
from pallas_kernels.skinny_gemm import ref as gemm_ref
from pallas_kernels.skinny_gemm import xla as gemm_xla
from pallas_kernels.skinny_gemm.api import skinny_gemm
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.swiglu_gemm.api import swiglu_gemm


def plain_xla(args: NormGemmArgs) -> Pair:
    """Both ops in plain XLA; supports differentiation and vmap."""
    quantised = of_either_order(quantised_xla.quantised_gemm)
    return in_turn(args, norm_xla.residual_norm, gemm_xla.skinny_gemm, quantised)


def definition(args: NormGemmArgs) -> Pair:
    """The definition of ``unfused``."""
    quantised = partial(chosen_definition, impl=args.pins.of("quantised_gemm"))
    return in_turn(args, norm_ref.residual_norm, gemm_ref.skinny_gemm, quantised)


def unfused(args: NormGemmArgs) -> Pair:
    """Each op in the implementation that ``pins`` or ``registry.select`` chooses."""
    pinned = args.pins.of

    def dense(gemm: GemmArgs) -> jax.Array:
        if gemm.swiglu:
            return swiglu_gemm(gemm, pinned("swiglu_gemm"))
        return skinny_gemm(gemm, pinned("skinny_gemm"))

    return in_turn(
        args,
        lambda norm: residual_norm(norm, pinned("residual_norm")),
        dense,
        lambda gemm: quantised_gemm(gemm, pinned("quantised_gemm")),
    )
