"""Named calls of norm_gemm on the matrices of real models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.norm_gemm.ref import NormGemmArgs
from pallas_kernels.quantised_gemm.cases import random_matrix, weight_bytes
from pallas_kernels.quantised_gemm.tiled.arrange import arrange
from pallas_kernels.residual_norm.ref import NormArgs


@dataclass(frozen=True)
class NormGemmCase:
    """``partials``: 0 for none, 1 for a GEMM output in the dtype, else the number in float32.

    With a ``form`` of quantised weights ``group`` inputs share a scale (0: all); those of other
    forms than fp8 are arranged for Hopper.
    """

    name: str
    tokens: int
    inner: int
    outer: int
    partials: int
    swiglu: bool = False
    gelu: bool = False
    dtype: str = "bfloat16"
    tags: tuple[str, ...] = ("ci",)
    form: str | None = None  # as of ``quantised_gemm.cases``
    group: int = 0
    bias: bool = False
    norm_dtype: str | None = None  # of the norm's weights, if it is another one


_GPU = ("bench", "gpu")
_OF_MODELS = (
    NormGemmCase("qwen3_4b_qkv", 1, 2560, 6144, 3, tags=_GPU),
    NormGemmCase("qwen3_4b_gate_up", 1, 2560, 9728, 3, swiglu=True, tags=_GPU),
    NormGemmCase("qwen3_8b_gate_up", 1, 4096, 12288, 2, swiglu=True, tags=_GPU),
    NormGemmCase("qwen3_8b_tp2_gate_up", 1, 4096, 6144, 2, swiglu=True, tags=("full",)),
)
CASES = (
    NormGemmCase("smollm2_first_qkv_t3_f32", 3, 576, 960, 0, dtype="float32", bias=True),
    NormGemmCase("smollm2_gate_up_t5_f32", 5, 576, 1536, 1, swiglu=True, dtype="float32"),
    NormGemmCase("narrow_qkv_parts3", 1, 512, 192, 3),
    NormGemmCase("narrow_qkv_f16", 1, 1024, 128, 1, dtype="float16", bias=True),
    NormGemmCase("float32_norm_qkv_parts2", 1, 512, 128, 2, norm_dtype="float32"),
    NormGemmCase("narrow_gate_up_parts2", 1, 1024, 128, 2, swiglu=True),
    NormGemmCase("narrow_geglu_parts2", 1, 512, 128, 2, swiglu=True, gelu=True),
    NormGemmCase("narrow_gate_up_t4_parts2", 4, 512, 128, 2, swiglu=True),
    NormGemmCase("narrow_qkv_int4_tiles", 1, 1024, 128, 3, form="int4", group=128),
    NormGemmCase("narrow_gate_up_q4_k_tiles", 1, 512, 128, 2, swiglu=True, form="q4_k", group=32),
    NormGemmCase("narrow_qkv_q6_k_tiles", 1, 512, 128, 1, form="q6_k", group=16, bias=True),
    NormGemmCase("narrow_gate_up_int4_tiles_t4", 4, 512, 128, 2, True, form="int4", group=128),
    NormGemmCase(
        "float32_norm_qkv_int4_tiles", 1, 512, 128, 2, form="int4", group=128, norm_dtype="float32"
    ),
    NormGemmCase("narrow_qkv_fp8", 1, 1024, 128, 3, form="fp8", bias=True),
    NormGemmCase("narrow_gate_up_fp8_blocks", 1, 512, 128, 2, True, form="fp8_blocks", group=128),
    *_OF_MODELS,
    *(
        replace(case, name=f"{case.name}_{name}", form=form, group=group)
        for name, form, group in (
            ("int4_tiles", "int4", 128),
            ("q4_k_tiles", "q4_k", 32),
            ("fp8", "fp8", 0),
            ("fp8_blocks", "fp8_blocks", 128),
        )
        for case in _OF_MODELS
    ),
)


def build(case: NormGemmCase, seed: int) -> Inputs:
    """Random tokens, partials and weights; the two unused norms are NaN."""
    rng = np.random.default_rng(seed)
    dtype, row = jnp.dtype(case.dtype), 1
    size = (case.tokens, case.inner)
    partials = normal(rng, size, dtype) if case.partials else None
    if case.partials > 1:
        partials = normal(rng, (case.partials, *size), np.dtype(np.float32))
    norms = np.full((3, case.inner), np.nan, case.norm_dtype or dtype)
    norms[row] = rng.uniform(0.5, 1.5, case.inner)
    columns = case.outer * (1 + case.swiglu)
    w: Any
    if case.form is None:
        w = normal(rng, (case.inner, columns), dtype, case.inner**-0.5)
    else:
        w = random_matrix(rng, case.form, columns, case.inner, case.group or case.inner)
        w = w if w.kind == "fp8" else arrange(w)
    args: Any = {"x": normal(rng, size, dtype), "partials": partials, "weights": norms}
    norm = NormArgs(**args, row=row, eps=1e-6)
    more: Any = {"swiglu": case.swiglu, "gelu": case.gelu}
    if case.bias:
        more["bias"] = normal(rng, (columns,), dtype)
    return Inputs((NormGemmArgs(norm=norm, w=w, **more),))


def cost(case: NormGemmCase) -> Cost:
    """Tokens, partials and weights read once, the sum and the result written once."""
    columns, item = case.outer * (1 + case.swiglu), jnp.dtype(case.dtype).itemsize
    size = case.tokens * case.inner
    values = case.inner + 2 * size + case.tokens * case.outer
    partials = size * case.partials * (4 if case.partials > 1 else item)
    weights = case.inner * columns * item
    if case.form is not None:
        weights = weight_bytes(case.form, columns, case.inner, case.group)
    return Cost(values * item + partials + weights, size * (2 * columns + case.partials + 4))
