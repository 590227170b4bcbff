"""Named calls of quantised_gemm, for each form and on the matrices of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import PACKED, Quantised, pack_nibbles
from pallas_kernels.lib.shapes import normal
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled.arrange import arrange

# The forms of cases: kind, and which of zeros, offsets and supers there are; fp8_blocks has scales
# of blocks of BLOCK outputs. Another one is mxfp4, whose scales are powers of 2 in bfloat16.
FORMS = (
    *("int4", "int4_zeros", "int4_offsets", "q4_k"),
    *("int8", "int8_offsets", "q5_k", "q6_k"),
    *("fp8", "fp4", "fp8_blocks"),
)
KIND_OF_FORM = MappingProxyType({"q4_k": "int4", "q5_k": "int8", "q6_k": "int8", "mxfp4": "fp4"})
BLOCK = 128


@dataclass(frozen=True)
class QuantisedCase:
    """A GEMM of [T, K] and [O, K] (with ``swiglu`` [2 * O, K]); ``group`` inputs have a scale."""

    name: str
    form: str  # one of FORMS, or mxfp4
    tokens: int
    inner: int
    outer: int
    group: int
    swiglu: bool = False
    split: bool = False
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)
    tiled: bool = False  # arranged for the Hopper kernels
    wide: bool = False  # a float32 result, as of an LM head
    lanes: bool = False  # arranged for the native kernel
    super_group: int = 256  # inputs of a super; fewer where parts of GGUF's blocks were moved
    bias: bool = False

    @property
    def kind(self) -> str:
        """The kind of the matrix."""
        return KIND_OF_FORM.get(self.form, self.form.partition("_")[0])


def _qwen3_4b(form: str, group: int, tokens: int, tiled: bool = False) -> tuple[QuantisedCase, ...]:
    """The four GEMMs of a layer."""
    sizes = (("qkv", 2560, 6144), ("o", 4096, 2560), ("gate_up", 2560, 9728), ("down", 9728, 2560))
    return tuple(
        QuantisedCase(
            f"qwen3_4b_{name}_{form}{'_tiles' * tiled}_t{tokens}",
            form,
            tokens,
            inner,
            outer,
            group,
            swiglu=name == "gate_up",
            split=name in ("o", "down"),
            dtype="bfloat16",
            tags=("bench", "gpu"),
            tiled=tiled,
        )
        for name, inner, outer in sizes
    )


_BF16 = "bfloat16"
_TILED: Mapping[str, Any] = MappingProxyType({"dtype": _BF16, "tiled": True})
_TILED_FORMS = (
    ("int4", 128),
    ("int4_zeros", 128),
    ("int4_offsets", 32),
    ("q4_k", 32),
    ("int8", 32),
    ("int8_offsets", 32),
    ("q5_k", 32),
    ("q6_k", 16),
    ("fp4", 32),
)
CASES = (
    *(
        QuantisedCase(f"{form}_t{tokens}_{dtype}", form, tokens, 512, 192, group, dtype=dtype)
        for form, group in zip(FORMS[:-1], (128, 128, 32, 32, 32, 32, 32, 16, 512, 32), strict=True)
        for tokens, dtype in ((1, "float32"), (8, _BF16))
    ),
    QuantisedCase("smollm2_gate_up_t3", "int4_offsets", 3, 576, 1536, 32, swiglu=True),
    QuantisedCase("smollm2_down_t32_bf16", "int4", 32, 1536, 576, 128, split=True, dtype=_BF16),
    QuantisedCase("fp8_groups_t64_bf16", "fp8", 64, 512, 256, 128, dtype=_BF16),
    QuantisedCase("fp8_blocks_t1", "fp8_blocks", 1, 512, 256, 128),
    QuantisedCase("fp8_blocks_t64_bf16", "fp8_blocks", 64, 512, 256, 128, dtype=_BF16),
    QuantisedCase("fp8_blocks_t264_bf16", "fp8_blocks", 264, 512, 256, 128, dtype=_BF16),
    QuantisedCase(
        "fp8_blocks_gate_up_t8", "fp8_blocks", 8, 512, 128, 128, swiglu=True, dtype=_BF16
    ),
    QuantisedCase("fp8_blocks_down_t64", "fp8_blocks", 64, 2560, 128, 128, split=True, dtype=_BF16),
    QuantisedCase("half_block_t5", "int4", 5, 96, 48, 32),
    # Powers of 2 times e2m1 are exact in bfloat16, so no implementation rounds weights or results.
    *(
        QuantisedCase(f"head_tiles_t{tokens}", "mxfp4", tokens, 512, 192, 32, wide=True, **_TILED)
        for tokens in (64, 136)
    ),
    QuantisedCase("int4_lanes_gate_up_t5", "int4", 5, 512, 96, 128, swiglu=True, lanes=True),
    *(
        QuantisedCase(f"{form}_tiles_t{tokens}", form, tokens, 512, 256, group, **_TILED)
        for form, group in _TILED_FORMS
        for tokens in (1, 16, 136)
    ),
    *(
        QuantisedCase(f"{form}_supers_of_128_t{t}", form, t, 512, 64, 32, super_group=128, **more)
        for form, t, more in (
            ("q4_k", 2, {"lanes": True}),
            ("q5_k", 5, {}),
            ("q4_k", 8, _TILED),
            ("q4_k", 136, _TILED),
        )
    ),
    QuantisedCase("bias_lanes_t3", "int4", 3, 512, 96, 128, lanes=True, bias=True),
    QuantisedCase("bias_fp8_t64", "fp8", 64, 512, 256, 128, dtype=_BF16, bias=True),
    *(
        QuantisedCase(f"bias_tiles_t{t}", "q4_k", t, 512, 128, 32, bias=True, **_TILED)
        for t in (3, 136)
    ),
    QuantisedCase("gate_up_tiles_t3", "int4", 3, 512, 128, 128, swiglu=True, **_TILED),
    QuantisedCase("gate_up_tiles_t200", "q4_k", 200, 512, 128, 32, swiglu=True, **_TILED),
    QuantisedCase("down_tiles_t64", "int4", 64, 1536, 128, 128, split=True, **_TILED),
    *(case for tokens in (1, 8, 64) for case in _qwen3_4b("int4", 128, tokens)),
    *(
        case
        for form, group, counts in (
            ("int4", 128, (1, 8, 64, 512, 1024, 8192)),
            ("q4_k", 32, (8, 64, 1024)),
        )
        for tokens in counts
        for case in _qwen3_4b(form, group, tokens, tiled=True)
    ),
    *(
        case
        for tokens in (1, 8, 64, 1024, 8192)
        for form, group in (("fp8", 0), ("fp8_blocks", 128))
        for case in _qwen3_4b(form, group, tokens)
    ),
    *(case for tokens in (1, 8, 64) for case in _qwen3_4b("q4_k", 32, tokens)),
)


def build(case: QuantisedCase, seed: int) -> Inputs:
    """Random values; scales make results of about the magnitude of the input."""
    rng = np.random.default_rng(seed)
    outer, inner = case.outer * (1 + case.swiglu), case.inner
    w = random_matrix(rng, case.form, outer, inner, case.group or inner, case.super_group)
    w = arrange(w) if case.tiled else LANES.arrange(w) if case.lanes else w
    x = normal(rng, (case.tokens, inner), jnp.dtype(case.dtype))
    args: Any = {"x": x, "w": w}
    if case.bias:
        args["bias"] = normal(rng, (outer,), x.dtype)
    args = QuantisedGemmArgs(**args, swiglu=case.swiglu, split=case.split, wide=case.wide)
    return Inputs((args,))


def random_matrix(
    rng: np.random.Generator,
    form: str,
    outer: int,
    inner: int,
    group: int,
    super_group: int = 256,
) -> Quantised:
    """A random matrix of this form; numpy arrays."""
    groups = (outer, inner // group)
    size = inner**-0.5

    def floats(scale: float) -> np.ndarray:
        return (rng.uniform(0.5, 1.5, groups) * scale).astype(np.float16)

    def supers(*means: float) -> np.ndarray:
        shape = (outer, max(1, inner // super_group), len(means))
        return (rng.uniform(0.5, 1.5, shape) * means).astype(np.float16)

    if form in ("fp8", "fp8_blocks"):
        if form == "fp8_blocks":
            groups = (outer // BLOCK, inner // group)
        values = rng.normal(size=(outer, inner)).astype(ml_dtypes.float8_e4m3fn)
        return Quantised("fp8", values, floats(size).astype(np.float32))
    if KIND_OF_FORM.get(form, form).startswith("int8"):
        low, high = {"q5_k": (0, 32), "q6_k": (-32, 32)}.get(form, (-128, 128))
        values = rng.integers(low, high, (outer, inner)).astype(np.int8)
        if form == "int8":
            return Quantised("int8", values, floats(size / 70))
        if form == "int8_offsets":
            offsets = floats(size) - np.float16(size)  # of either sign
            return Quantised("int8", values, floats(size / 70), offsets=offsets)
        if form == "q6_k":
            small = rng.integers(-128, 128, groups).astype(np.int8)
            return Quantised("int8", values, small, supers=supers(size / 1300))
        small, minima = (rng.integers(0, 64, groups).astype(np.uint8) for _ in range(2))
        return Quantised("int8", values, small, None, minima, supers(size / 530, -size / 34))
    values = pack_nibbles(rng.integers(0, 16, (outer, inner)))
    if form == "fp4":
        return Quantised("fp4", values, floats(size / 3))
    if form == "mxfp4":
        powers = np.exp2(np.rint(np.log2(floats(size / 3).astype(np.float32))))
        return Quantised("fp4", values, powers.astype(ml_dtypes.bfloat16))
    if form == "int4":
        return Quantised("int4", values, floats(size / 5))
    if form == "int4_zeros":
        zeros = rng.integers(0, 16, groups).astype(np.uint8)
        return Quantised("int4", values, floats(size / 7), zeros)
    if form == "int4_offsets":
        return Quantised("int4", values, floats(size / 5), offsets=-floats(size * 1.5))
    small, minima = (rng.integers(0, 64, groups).astype(np.uint8) for _ in range(2))
    return Quantised("int4", values, small, None, minima, supers(size / 256, -size / 34))


def weight_bytes(form: str, outer: int, inner: int, group: int) -> int:
    """Bytes of the values and scales of a matrix of ``outer`` outputs."""
    per_value = 0.5 if KIND_OF_FORM.get(form, form.partition("_")[0]) in PACKED else 1.0
    of_scales = 2 / (group or inner) / (BLOCK if form == "fp8_blocks" else 1)
    return int(outer * inner * (per_value + of_scales))


def cost(case: QuantisedCase) -> Cost:
    """Weights and tokens read once, the result written once, without partials."""
    columns = case.outer * (1 + case.swiglu)
    weights = weight_bytes(case.form, columns, case.inner, case.group)
    moved = case.tokens * (case.inner + case.outer) * jnp.dtype(case.dtype).itemsize
    return Cost(bytes=weights + moved, flops=2 * case.tokens * case.inner * columns)
