"""Named calls of skinny_gemm on the matrices of real models."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.registry import Cost, Inputs
from pallas_kernels.skinny_gemm.sizes import ARRIVALS, Sizes

MOST_VALUES = 1_000_003  # that are drawn; larger arrays repeat them, by no row's length


@dataclass(frozen=True)
class GemmCase:
    """A product [T, I] @ [I, O], or [I, 2 * O] with ``swiglu``."""

    name: str
    tokens: int
    inner: int
    outer: int
    norm: bool = False
    swiglu: bool = False
    residual: bool = False
    parts: int = 1
    arrivals: bool = True
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)

    @property
    def sizes(self) -> Sizes:
        """What a choice of launch may depend on."""
        return Sizes(self.tokens, self.inner, self.outer, self.norm, self.swiglu, self.dtype)


def _qwen3_4b(tokens: int) -> tuple[GemmCase, ...]:
    """The four products of a layer of a decode step on a GPU."""
    more = {"dtype": "bfloat16", "tags": ("bench", "gpu")}
    return (
        GemmCase(f"qwen3_4b_qkv_t{tokens}", tokens, 2560, 6144, norm=True, **more),
        GemmCase(f"qwen3_4b_o_t{tokens}", tokens, 4096, 2560, residual=True, **more),
        GemmCase(f"qwen3_4b_gate_up_t{tokens}", tokens, 2560, 9728, norm=True, swiglu=True, **more),
        GemmCase(f"qwen3_4b_down_t{tokens}", tokens, 9728, 2560, residual=True, **more),
    )


def _qwen3_4b_bare(tokens: int) -> tuple[GemmCase, ...]:
    """The same with norm and residual left to other kernels."""
    more = {"arrivals": False, "dtype": "bfloat16", "tags": ("bench", "gpu")}
    return (
        GemmCase(f"qwen3_4b_bare_qkv_t{tokens}", tokens, 2560, 6144, **more),
        GemmCase(f"qwen3_4b_bare_o_t{tokens}", tokens, 4096, 2560, parts=3, **more),
        GemmCase(f"qwen3_4b_bare_gate_up_t{tokens}", tokens, 2560, 9728, swiglu=True, **more),
        GemmCase(f"qwen3_4b_bare_down_t{tokens}", tokens, 9728, 2560, parts=3, **more),
    )


_BF16, _F16 = "bfloat16", "float16"
CASES = (
    GemmCase("smollm2_qkv_t1", 1, 576, 960, norm=True),
    GemmCase("smollm2_qkv_t17_bf16", 17, 576, 960, norm=True, dtype=_BF16),
    GemmCase("smollm2_o_t3", 3, 576, 576, residual=True),
    GemmCase("smollm2_o_t3_own_arrivals", 3, 576, 576, residual=True, arrivals=False),
    GemmCase("smollm2_gate_up_t3", 3, 576, 1536, norm=True, swiglu=True),
    GemmCase("smollm2_gate_up_t17_bf16", 17, 576, 1536, norm=True, swiglu=True, dtype=_BF16),
    GemmCase("smollm2_gate_up_t1_own_arrivals", 1, 576, 1536, True, True, False, 1, False, _BF16),
    GemmCase("smollm2_down_t1_bf16", 1, 1536, 576, residual=True, dtype=_BF16),
    GemmCase("smollm2_down_t65_bf16", 65, 1536, 576, residual=True, dtype=_BF16),
    GemmCase("smollm2_down_t3_f16", 3, 1536, 576, residual=True, dtype=_F16),
    GemmCase("smollm2_qkv_bare_t8_bf16", 8, 576, 960, dtype=_BF16),
    GemmCase("smollm2_qkv_bare_t128_f16", 128, 576, 960, dtype=_F16),
    GemmCase("smollm2_o_parts2_t3_bf16", 3, 576, 576, parts=2, dtype=_BF16),
    GemmCase("smollm2_down_parts3_t32_bf16", 32, 1536, 576, parts=3, dtype=_BF16),
    GemmCase("smollm2_gate_up_bare_t1_bf16", 1, 576, 1536, swiglu=True, dtype=_BF16),
    GemmCase("smollm2_gate_up_bare_t128_bf16", 128, 576, 1536, swiglu=True, dtype=_BF16),
    GemmCase("uneven_columns_t5", 5, 200, 136, norm=True, residual=True),
    GemmCase("uneven_gate_up_t200_bf16", 200, 200, 72, norm=True, swiglu=True, dtype=_BF16),
    *(case for tokens in (1, 8, 16, 32, 64, 128, 256) for case in _qwen3_4b(tokens)),
    *(case for tokens in (1, 8, 64, 256) for case in _qwen3_4b_bare(tokens)),
)


def build(case: GemmCase, seed: int) -> Inputs:
    """Random arrays; weights are such that products are about as large as normalised tokens."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        values = rng.standard_normal(min(math.prod(shape), MOST_VALUES), np.float32)
        return np.resize((scale * values).astype(dtype), shape)

    columns = 2 * case.outer if case.swiglu else case.outer
    x = normal(case.tokens, case.inner, scale=3.0 if case.norm else 1.0)
    w = normal(case.inner, columns, scale=case.inner**-0.5)
    norm = rng.uniform(0.5, 1.5, case.inner).astype(dtype) if case.norm else None
    residual = normal(case.tokens, case.outer) if case.residual else None
    arrivals = np.zeros(ARRIVALS, np.int32) if case.arrivals else None
    static = {"eps": 1e-6, "swiglu": case.swiglu, "parts": case.parts}
    return Inputs((x, w, norm, residual, arrivals), static)


def cost(case: GemmCase) -> Cost:
    """Weights and tokens read once, results written once."""
    columns = 2 * case.outer if case.swiglu else case.outer
    itemsize = jnp.dtype(case.dtype).itemsize
    out = case.tokens * case.outer * (case.parts * 4 if case.parts > 1 else itemsize)
    residual = case.tokens * case.outer if case.residual else 0
    norm = case.inner if case.norm else 0
    return Cost(
        bytes=(case.inner * (columns + case.tokens) + residual + norm) * itemsize + out,
        flops=2 * case.tokens * case.inner * columns,
    )
