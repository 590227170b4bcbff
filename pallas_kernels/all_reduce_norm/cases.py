"""Named calls of all_reduce_norm on one device, where it adds split-K partials and normalises."""

from __future__ import annotations

from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.residual_norm import cases as norm_cases
from pallas_kernels.residual_norm.cases import NormCase

CASES = (
    NormCase("uneven", 3, 203, 1),
    NormCase("uneven_parts3", 5, 577, 3),
    NormCase("smollm2_bf16", 17, 576, 1, "bfloat16"),
    NormCase("wide_f16_parts2", 3, 1500, 2, "float16"),
    NormCase("llama3_70b_parts2_bf16", 2, 8192, 2, "bfloat16"),
    *(
        NormCase(f"qwen3_32b_t{t}", t, 5120, 2, "bfloat16", tags=("bench", "gpu"))
        for t in (1, 8, 64)
    ),
)


def build(case: NormCase, seed: int) -> Inputs:
    """Random tokens and partials; the weights of the unused norms are NaN."""
    (norm,) = norm_cases.build(case, seed).args
    return Inputs((AllReduceNormArgs(norm=norm),))


def cost(case: NormCase) -> Cost:
    """See ``residual_norm``."""
    return norm_cases.cost(case)
