"""Named calls of skinny_gemm on the matrices of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.skinny_gemm.ref import GemmArgs


class GemmSizes(NamedTuple):
    """The sizes that a config may depend on: [T, I] @ [I, O], or [I, 2 * O] with ``swiglu``."""

    tokens: int
    inner: int
    outer: int
    swiglu: bool
    split: bool
    dtype: str
    gelu: bool = False


def sizes_of(args: GemmArgs) -> GemmSizes:
    """The sizes of a call's arguments."""
    (tokens, inner), outer = args.x.shape, args.w.shape[1] // (1 + args.swiglu)
    dtype = str(args.x.dtype)
    return GemmSizes(tokens, inner, outer, args.swiglu, args.split, dtype, args.gelu)


@dataclass(frozen=True)
class GemmCase:
    """A GEMM [T, I] @ [I, O], or [I, 2 * O] with ``swiglu``; by output the result is float32."""

    name: str
    tokens: int
    inner: int
    outer: int
    swiglu: bool = False
    split: bool = False
    gelu: bool = False
    by_output: bool = False
    bias: bool = False
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)

    @property
    def sizes(self) -> GemmSizes:
        """The sizes of the case's call."""
        sizes = self.tokens, self.inner, self.outer
        return GemmSizes(*sizes, self.swiglu, self.split, self.dtype, self.gelu)


def _qwen3_4b(tokens: int) -> tuple[GemmCase, ...]:
    """The four GEMMs of a layer of a decode step on a GPU."""
    more = {"dtype": "bfloat16", "tags": ("bench", "gpu")}
    return (
        GemmCase(f"qwen3_4b_qkv_t{tokens}", tokens, 2560, 6144, **more),
        GemmCase(f"qwen3_4b_o_t{tokens}", tokens, 4096, 2560, split=True, **more),
        GemmCase(f"qwen3_4b_gate_up_t{tokens}", tokens, 2560, 9728, swiglu=True, **more),
        GemmCase(f"qwen3_4b_down_t{tokens}", tokens, 9728, 2560, split=True, **more),
    )


_BF16, _F16 = "bfloat16", "float16"
CASES = (
    GemmCase("smollm2_qkv_t1", 1, 576, 960, bias=True),
    GemmCase("smollm2_qkv_t8_bf16", 8, 576, 960, dtype=_BF16, bias=True),
    GemmCase("smollm2_qkv_t128_f16", 128, 576, 960, dtype=_F16, bias=True),
    GemmCase("smollm2_o_t3_bf16", 3, 576, 576, split=True, dtype=_BF16),
    GemmCase("smollm2_o_t8_bf16", 8, 576, 576, split=True, dtype=_BF16, bias=True),
    GemmCase("smollm2_gate_up_t3", 3, 576, 1536, swiglu=True),
    GemmCase("gemma3_gate_up_t3", 3, 640, 256, swiglu=True, gelu=True),
    GemmCase("gemma3_gate_up_t3_bf16", 3, 640, 256, swiglu=True, gelu=True, dtype=_BF16),
    GemmCase("smollm2_gate_up_t1_bf16", 1, 576, 1536, swiglu=True, dtype=_BF16),
    GemmCase("smollm2_gate_up_t64_bf16", 64, 576, 1536, swiglu=True, dtype=_BF16),
    GemmCase("smollm2_down_t3", 3, 1536, 576, split=True),
    GemmCase("smollm2_down_t32_bf16", 32, 1536, 576, split=True, dtype=_BF16),
    GemmCase("uneven_columns_t5", 5, 200, 136),
    GemmCase("uneven_by_output_t6", 6, 203, 133, by_output=True),
    GemmCase("uneven_inputs_t7", 7, 517, 131),
    GemmCase("uneven_by_output_t3_bf16", 3, 203, 133, by_output=True, dtype=_BF16),
    GemmCase("uneven_gate_up_t200_bf16", 200, 200, 72, swiglu=True, dtype=_BF16),
    *(case for tokens in (1, 8, 16, 32, 64, 128, 256) for case in _qwen3_4b(tokens)),
)


def build(case: GemmCase, seed: int) -> Inputs:
    """Random arrays; weights are scaled so that results have about the magnitude of the input."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    x = normal(rng, (case.tokens, case.inner), dtype)
    w = normal(rng, (case.inner, case.outer * (1 + case.swiglu)), dtype, case.inner**-0.5)
    if case.by_output:
        w = np.ascontiguousarray(w.T)
    args: Any = {"x": x, "w": w, "by_output": case.by_output, "wide": case.by_output}
    args |= {"swiglu": case.swiglu, "split": case.split, "gelu": case.gelu}
    args["bias"] = normal(rng, (case.outer,), dtype) if case.bias else None
    return Inputs((GemmArgs(**args),))


def cost(case: GemmCase) -> Cost:
    """Weights and tokens read once, the result written once, without partials."""
    columns = case.outer * (1 + case.swiglu)
    values = case.inner * (columns + case.tokens) + case.tokens * case.outer
    return Cost(
        bytes=values * jnp.dtype(case.dtype).itemsize,
        flops=2 * case.tokens * case.inner * columns,
    )
