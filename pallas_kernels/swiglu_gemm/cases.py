"""Named calls of swiglu_gemm on the matrices of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.skinny_gemm.ref import GemmArgs


@dataclass(frozen=True)
class SwigluCase:
    """A GEMM [T, I] @ [I, 2 * O] with SwiGLU, or with ``gelu`` GEGLU."""

    name: str
    tokens: int
    inner: int
    outer: int
    dtype: str = "bfloat16"
    gelu: bool = False
    tags: tuple[str, ...] = ("ci",)


def _qwen3_4b(tokens: int) -> SwigluCase:
    """A prefill step on a GPU, or a decode step of many rows."""
    return SwigluCase(f"qwen3_4b_t{tokens}", tokens, 2560, 9728, tags=("bench", "gpu"))


CASES = (
    SwigluCase("smollm2_t5_f32", 5, 576, 1536, "float32"),
    SwigluCase("smollm2_t130", 130, 576, 1536),
    SwigluCase("uneven_t200_f16", 200, 200, 72, "float16"),
    SwigluCase("gemma3_t130", 130, 640, 256, gelu=True),
    SwigluCase("narrow_t7_bf16", 7, 512, 192),
    SwigluCase("narrow_t264_bf16", 264, 512, 320),
    *(
        SwigluCase(f"gemma4_26b_t{tokens}", tokens, 2816, 2112, gelu=True, tags=("bench", "gpu"))
        for tokens in (512, 8192)
    ),
    *(_qwen3_4b(tokens) for tokens in (128, 256, 512, 1024, 2048, 4096, 8192)),
)


def build(case: SwigluCase, seed: int) -> Inputs:
    """Random arrays; weights are scaled so that results have about the magnitude of the input."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    x = normal(rng, (case.tokens, case.inner), dtype)
    w = normal(rng, (case.inner, case.outer * 2), dtype, case.inner**-0.5)
    args: Any = {"x": x, "w": w}
    return Inputs((GemmArgs(**args, swiglu=True, gelu=case.gelu),))


def cost(case: SwigluCase) -> Cost:
    """Weights and tokens read once, the result written once."""
    values = case.inner * (2 * case.outer + case.tokens) + case.tokens * case.outer
    return Cost(
        bytes=values * jnp.dtype(case.dtype).itemsize,
        flops=4 * case.tokens * case.inner * case.outer,
    )
