"""Named calls of residual_norm on the widths of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.residual_norm.ref import NormArgs


@dataclass(frozen=True)
class NormCase:
    """``partials``: 0 for none, 1 for a GEMM output in the dtype, else the number in float32."""

    name: str
    tokens: int
    width: int
    partials: int
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)
    norm_dtype: str | None = None  # of weights, if it is another one


def _qwen3_4b(tokens: int, partials: int) -> NormCase:
    """Between two GEMMs of a step on a GPU."""
    name = f"qwen3_4b_t{tokens}" + (f"_parts{partials}" if partials > 1 else "")
    return NormCase(name, tokens, 2560, partials, "bfloat16", ("bench", "gpu"))


CASES = (
    NormCase("smollm2_first_norm", 3, 576, 0),
    NormCase("smollm2_first_norm_bf16", 3, 576, 0, "bfloat16"),
    NormCase("smollm2_one_token", 1, 576, 1),
    NormCase("smollm2_bf16", 17, 576, 1, "bfloat16"),
    NormCase("float32_norm_parts2", 3, 1024, 2, "bfloat16", norm_dtype="float32"),
    NormCase("smollm2_f16_parts2", 5, 576, 2, "float16"),
    NormCase("uneven_parts3", 4, 203, 3),
    NormCase("qwen3_4b_parts3_bf16", 9, 2560, 3, "bfloat16"),
    NormCase("qwen3_0_6b_f16", 3, 1024, 1, "float16"),
    NormCase("qwen3_4b_parts8_bf16", 2, 2560, 8, "bfloat16"),
    NormCase("llama3_70b_parts8", 2, 8192, 8),
    NormCase("llama3_70b_parts6_bf16", 2, 8192, 6, "bfloat16"),
    *(_qwen3_4b(tokens, partials) for tokens in (1, 8, 32, 64, 128, 256) for partials in (1, 8)),
    _qwen3_4b(8192, 1),
)


def build(case: NormCase, seed: int) -> Inputs:
    """Random tokens and partials; the weights of the two unused norms are NaN."""
    rng = np.random.default_rng(seed)
    dtype, row = jnp.dtype(case.dtype), 1
    size = (case.tokens, case.width)
    partials = normal(rng, size, dtype) if case.partials else None
    if case.partials > 1:
        partials = normal(rng, (case.partials, *size), np.dtype(np.float32))
    weights = np.full((3, case.width), np.nan, case.norm_dtype or dtype)
    weights[row] = rng.uniform(0.5, 1.5, case.width)
    args: dict[str, Any] = {
        "x": normal(rng, size, dtype),
        "partials": partials,
        "weights": weights,
    }
    return Inputs((NormArgs(**args, row=row, eps=1e-6),))


def cost(case: NormCase) -> Cost:
    """Tokens and partials read once, the sum and the norm written once."""
    size, item = case.tokens * case.width, jnp.dtype(case.dtype).itemsize
    arrays = 3 if case.partials else 2
    partials = case.partials * (4 if case.partials > 1 else item)
    return Cost(size * (arrays * item + partials) + case.width * item, size * (case.partials + 4))
