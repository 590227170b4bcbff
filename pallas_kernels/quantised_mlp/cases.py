"""Named calls of quantised_mlp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.quantised_gemm.cases import random_matrix, weight_bytes
from pallas_kernels.quantised_mlp.ref import MlpArgs


@dataclass(frozen=True)
class MlpCase:
    """``tokens`` of ``width`` components, ``hidden`` values; ``group`` inputs have a scale (0:
    all of a row).
    """

    name: str
    form: str  # as of ``quantised_gemm.cases``
    tokens: int
    width: int
    hidden: int
    group: int = 0
    split: bool = False
    dtype: str = "bfloat16"
    tags: tuple[str, ...] = ("ci",)


_GPU = ("bench", "gpu")
CASES = (
    MlpCase("int4_t3_f32", "int4", 3, 128, 256, 32, dtype="float32"),
    MlpCase("q4_k_t5_f32", "q4_k", 5, 256, 512, 32, dtype="float32"),
    MlpCase("fp8_t72", "fp8", 72, 512, 512),
    MlpCase("fp8_t264", "fp8", 264, 512, 640),  # down's kernel is that for many tokens
    MlpCase("fp8_blocks_t72", "fp8_blocks", 72, 512, 512, 128),
    *(
        MlpCase(f"qwen3_4b_fp8_t{tokens}", "fp8", tokens, 2560, 9728, split=True, tags=_GPU)
        for tokens in (128, 512, 1024, 8192)
    ),
)


def build(case: MlpCase, seed: int) -> Inputs:
    """Random tokens and matrices."""
    rng = np.random.default_rng(seed)
    x = normal(rng, (case.tokens, case.width), jnp.dtype(case.dtype))
    shapes = (2 * case.hidden, case.width), (case.width, case.hidden)
    args: Any = {"x": x}
    for name, (outer, inner) in zip(("gate_up", "down"), shapes, strict=True):
        args[name] = random_matrix(rng, case.form, outer, inner, case.group or inner)
    return Inputs((MlpArgs(**args, split=case.split),))


def cost(case: MlpCase) -> Cost:
    """Weights and tokens read once, the result written once; hidden values are not counted."""
    gate_up = weight_bytes(case.form, 2 * case.hidden, case.width, case.group)
    down = weight_bytes(case.form, case.width, case.hidden, case.group)
    moved = 2 * case.tokens * case.width * jnp.dtype(case.dtype).itemsize
    return Cost(gate_up + down + moved, 6 * case.tokens * case.width * case.hidden)
