"""Named calls of experts: forms, uneven loads, biases, and the layers of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import GEGLU, PLAIN, RELU2, SWIGLU, Activation, Stack
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import PACKED, Quantised
from pallas_kernels.lib.shapes import normal
from pallas_kernels.quantised_gemm.cases import BLOCK, KIND_OF_FORM, random_matrix
from pallas_kernels.quantised_gemm.tiled.arrange import arrange

CLAMPED = Activation(limit=7.0, alpha=1.702, shift=1.0)  # gpt-oss's
BOUNDED = Activation(limit=0.5, gate_limit=0.7)  # as Step 3.5's


@dataclass(frozen=True)
class ExpertsCase:
    """``tokens`` of width D that choose ``chosen`` of ``count`` experts of width F.

    ``load`` says which: "uniform"; "few", all tokens the same ones; "holes": a choice of three is
    outside the experts. ``form`` is PLAIN or one of ``quantised_gemm.cases.FORMS``.
    """

    name: str
    tokens: int
    count: int
    chosen: int
    width: int
    inner: int
    form: str = PLAIN
    group: int = 32
    load: str = "uniform"
    biases: bool = False
    activation: Activation = SWIGLU
    split: bool = False
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)
    tiled: bool = False  # arranged for the Hopper kernels
    lanes: bool = False  # arranged for the native kernel

    @property
    def kind(self) -> str:
        """The kind of the matrices."""
        return KIND_OF_FORM.get(self.form, self.form.partition("_")[0])


QWEN3_30B = ExpertsCase("qwen3_30b", 1, 128, 8, 2048, 768, dtype="bfloat16", tags=("bench", "gpu"))
GPT_OSS_20B = replace(
    QWEN3_30B,
    name="gpt_oss_20b_fp4",
    count=32,
    chosen=4,
    width=2880,
    inner=2880,
    form="mxfp4",
    biases=True,
    activation=CLAMPED,
    tiled=True,
)
V2_LITE = replace(QWEN3_30B, name="v2_lite", count=64, chosen=6, inner=1408)
GEMMA4_26B = replace(QWEN3_30B, name="gemma4_26b", width=2816, inner=704, activation=GEGLU)
INT4 = replace(QWEN3_30B, name="qwen3_30b_int4", form="int4", group=128, tiled=True)
Q4_K = replace(INT4, name="qwen3_30b_q4_k", form="q4_k", group=32)
FP8 = replace(QWEN3_30B, name="qwen3_30b_fp8", form="fp8_blocks", group=128, tiled=True)
FP8_ROWS = replace(FP8, name="qwen3_30b_fp8_rows", form="fp8", group=0)
V3 = replace(FP8, name="deepseek_v3_fp8", count=16, width=7168, inner=2048)  # 16 of 256 experts
MOST_DRAWN = 8  # experts repeat after these, as drawing the values of many takes seconds
STEPS = (1, 8, 64, 512, 1024, 8192)  # tokens of the steps that the benchmark times


def _steps(case: ExpertsCase) -> tuple[ExpertsCase, ...]:
    return tuple(
        replace(case, name=f"{case.name}_t{tokens}", tokens=tokens, split=tokens <= STEPS[2])
        for tokens in STEPS
    )


_SMALL = ExpertsCase("", 5, 7, 3, 64, 96)
_BF16 = replace(_SMALL, dtype="bfloat16", width=128, inner=64, split=True, tags=("full",))
_FP8_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {"width": 2048, "inner": 128, "count": 4}),  # more K steps than stages
    ("_t100", {"width": 128, "inner": 256, "tokens": 100, "load": "holes"}),
    ("_t200", {"width": 256, "inner": 128, "tokens": 200, "split": False}),
    ("_t300", {"width": 2048, "inner": 128, "count": 4, "tokens": 300, "split": False}),
)
# Inputs in whole blocks of 256: one in gate_up, four in down.
_K_FORM = MappingProxyType({"width": 256, "inner": 1024, "count": 4})
_FORMS_OF_TILES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("int4_zeros", {"group": 64}),
    ("int4_offsets", {}),
    ("int8_offsets", {}),
    ("q4_k", _K_FORM),
    ("q5_k", _K_FORM),
    ("q6_k", {**_K_FORM, "group": 16}),
)
_TILED_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    ("_t100", {"tokens": 100, "load": "holes"}),
    ("_t300", {"tokens": 300, "split": False}),
)
CASES = (
    replace(_SMALL, name="one_token", tokens=1),
    replace(_SMALL, name="seven_experts"),
    replace(_SMALL, name="few_experts_chosen", tokens=70, load="few"),
    replace(_SMALL, name="outside", tokens=33, load="holes"),
    replace(_SMALL, name="all_chosen", count=3),
    replace(_SMALL, name="one_expert", count=1, chosen=1),
    replace(_SMALL, name="geglu", activation=GEGLU),
    replace(_SMALL, name="relu2", activation=RELU2),
    replace(_SMALL, name="relu2_int4", activation=RELU2, form="int4", width=256, inner=256),
    replace(_SMALL, name="gpt_oss", biases=True, activation=CLAMPED),
    *(
        replace(_SMALL, name=form, form=form, width=256, inner=256, group=group, tokens=tokens)
        for form, group, tokens in (
            ("int4", 32, 5),
            ("int4_zeros", 128, 1),
            ("q4_k", 32, 40),
            ("int8", 32, 5),
            ("fp8", 0, 5),
            ("fp8_blocks", 128, 5),
        )
    ),
    *(  # for tests of the native kernel, which rounds activations of other forms than fp8
        replace(
            _SMALL,
            name=f"{form}_lanes",
            form=form,
            width=256,
            inner=256,
            group=BLOCK if form == "fp8_blocks" else 32,
            lanes=True,
            tokens=tokens,
            biases=form == "fp4",
            activation=CLAMPED if form == "fp4" else SWIGLU,
            tags=(),
        )
        for form, tokens in (
            *(("int4", 1), ("int8", 33), ("q4_k", 5), ("fp4", 5), ("fp8", 5)),
            ("fp8_blocks", 33),
        )
    ),
    replace(_SMALL, name="fp4", form="fp4", biases=True, activation=CLAMPED),
    replace(_BF16, name="seven_experts_bf16", tags=("ci",)),
    replace(_BF16, name="one_token_bf16", tokens=1),
    replace(_BF16, name="outside_bf16", tokens=33, load="holes"),
    replace(_BF16, name="few_chosen_bf16", tokens=300, load="few"),
    replace(_BF16, name="gpt_oss_bf16", tokens=9, biases=True, activation=CLAMPED),
    replace(_BF16, name="gpt_oss_bf16_t200", tokens=200, biases=True, activation=CLAMPED),
    replace(_BF16, name="bounded_bf16", tokens=9, activation=BOUNDED),
    replace(_BF16, name="many_bf16", tokens=700, count=13, split=False),
    replace(_BF16, name="geglu_bf16", tokens=9, activation=GEGLU),
    replace(_BF16, name="geglu_bf16_t200", tokens=200, activation=GEGLU, width=704, inner=704),
    replace(_BF16, name="geglu_int4_tiles", form="int4", tiled=True, activation=GEGLU),
    replace(
        _BF16,
        name="geglu_fp8_tiles_t300",
        form="fp8",
        group=0,
        tiled=True,
        tokens=300,
        activation=GEGLU,
    ),
    replace(_BF16, name="int4_tiles", form="int4", tiled=True),
    replace(_BF16, name="int4_tiles_t300", form="int4", tiled=True, tokens=300),
    replace(_BF16, name="int8_tiles", form="int8", tiled=True),
    replace(_BF16, name="int8_tiles_t300", form="int8", tiled=True, tokens=300),
    *(
        replace(_BF16, name=f"{form}_tiles{suffix}", form=form, tiled=True, **sizes, **more)
        for form, sizes in _FORMS_OF_TILES
        for suffix, more in _TILED_CALLS
    ),
    replace(_BF16, name="fp4_tiles", form="fp4", tiled=True, biases=True, activation=CLAMPED),
    replace(_BF16, name="mxfp4_tiles", form="mxfp4", tiled=True, tokens=9),
    replace(_BF16, name="mxfp4_tiles_t100", form="mxfp4", tiled=True, tokens=100, load="holes"),
    replace(_BF16, name="mxfp4_tiles_t200", form="mxfp4", tiled=True, tokens=200, biases=True),
    replace(_BF16, name="holes_bf16_t100", tokens=100, load="holes"),
    replace(_BF16, name="fp8_bf16", form="fp8", group=0),
    *(
        replace(_BF16, name=f"{form}_tiles{suffix}", form=form, group=group, tiled=True, **more)
        for form, group in (("fp8", 0), ("fp8_blocks", 128))
        for suffix, more in _FP8_CALLS
    ),
    *(
        case
        for model in (QWEN3_30B, GEMMA4_26B, INT4, Q4_K, FP8, FP8_ROWS, V3, GPT_OSS_20B, V2_LITE)
        for case in _steps(model)
    ),
)


def build(case: ExpertsCase, seed: int) -> Inputs:
    """Random arrays. The weights of experts that no token chose are NaN, where they can be."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)
    x = normal(rng, (case.tokens, case.width), dtype)
    scores = rng.standard_normal((1 if case.load == "few" else case.tokens, case.count))
    choices = np.argsort(scores, axis=1)[:, : case.chosen].astype(np.int32)
    choices = np.ascontiguousarray(np.broadcast_to(choices, (case.tokens, case.chosen)))
    if case.load == "holes":
        outside = np.array([-1, case.count, 2**30], np.int32)
        holes = rng.random(choices.shape) < 1 / 3
        choices = np.where(holes, rng.choice(outside, choices.shape), choices)
    weights = rng.dirichlet(np.ones(case.chosen), case.tokens).astype(np.float32)
    unread = np.setdiff1d(np.arange(case.count), choices)
    outputs = case.activation.halves * case.inner
    gate_up = _stack(case, rng, outputs, case.width, unread)
    down = _stack(case, rng, case.width, case.inner, unread)
    biases: list[Any] = [None, None]
    if case.biases:
        sizes = (outputs, case.width)
        biases = [normal(rng, (case.count, size), dtype, 0.3) for size in sizes]
    args: dict[str, Any] = {
        "x": x,
        "choices": choices,
        "weights": weights,
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": biases[0],
        "down_bias": biases[1],
    }
    return Inputs((ExpertsArgs(**args, activation=case.activation, split=case.split),))


def _stack(
    case: ExpertsCase, rng: np.random.Generator, outer: int, inner: int, unread: np.ndarray
) -> Stack:
    if case.form == PLAIN:
        w = normal(rng, (case.count, outer, inner), jnp.dtype(case.dtype), inner**-0.5)
        w[unread] = np.nan
        return w  # type: ignore[return-value]
    drawn = (
        random_matrix(rng, case.form, outer, inner, case.group or inner)
        for _ in range(min(case.count, MOST_DRAWN))
    )
    arranged = arrange if case.tiled else LANES.arrange if case.lanes else _as_is
    made = [arranged(w) for w in drawn]
    members = [made[expert % len(made)].arrays for expert in range(case.count)]
    stacked = [
        None if parts[0] is None else np.stack(parts) for parts in zip(*members, strict=True)
    ]
    if (form := made[0].recorded) is not None:
        assert stacked[0] is not None
        stacked[0][unread, :, :, -1] = np.full(2, np.nan, np.float16).view(np.int32)[0]
        return Quantised(made[0].kind, stacked[0], recorded=form)
    factors = stacked[4] if stacked[4] is not None else stacked[1]
    assert factors is not None
    factors[unread] = np.nan
    return Quantised(made[0].kind, *stacked)


def _as_is(w: Quantised) -> Quantised:
    return w


def cost(case: ExpertsCase) -> Cost:
    """Weights of the expected number of distinct experts and tokens read once, the sum written."""
    uniform = case.count * (1 - (1 - case.chosen / case.count) ** case.tokens)
    distinct = case.chosen if case.load == "few" else uniform
    values = (1 + case.activation.halves) * case.width * case.inner
    item = jnp.dtype(case.dtype).itemsize
    per_value = item
    if case.form != PLAIN:
        outputs = BLOCK if case.form == "fp8_blocks" else 1  # that share a scale
        of_scales = 2 / case.group / outputs if case.group else 0
        per_value = (0.5 if case.kind in PACKED else 1) + of_scales
    moved = 2 * case.tokens * case.width * item
    pairs = case.tokens * case.chosen
    return Cost(bytes=int(distinct * values * per_value) + moved, flops=2 * pairs * values)
