"""skinny_gemm in Mosaic without a GPU: right in JAX's interpreter, and lowered for Hopper.

What a launch may be is tried by hand, as the rule's choices for small matrices are few.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registry import Impl, select
from pallas_kernels.skinny_gemm import launch, mosaic
from pallas_kernels.skinny_gemm.api import OP
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase
from pallas_kernels.skinny_gemm.launch import Launch
from pallas_kernels.testing import mismatch

MOSAIC = next(impl for impl in OP.impls if impl.name == "mosaic")
FASTER_IN_XLA = ("qwen3_4b_gate_up_t128", "qwen3_4b_gate_up_t256", "qwen3_4b_qkv_t256")
FIT = [
    case
    for case in CASES
    if case.inner % 64 == 0 and case.dtype != "float32" and case.name not in FASTER_IN_XLA
]
INTERPRETED = [case for case in FIT if "ci" in case.tags]

GATE_UP = GemmCase("gate_up", 16, 256, 256, swiglu=True, dtype="bfloat16")
PLAIN = replace(GATE_UP, name="plain", swiglu=False)
PARTS = replace(PLAIN, name="parts", split=True)
LAUNCHES = {
    "one_step": (replace(PLAIN, inner=64), Launch(64, 64, 2)),
    "fewer_steps_than_stages": (PLAIN, Launch(64, 128, 4)),
    "uneven_parts": (replace(PARTS, tokens=1, inner=320), Launch(64, 64, 2, parts=3)),
    "a_part_is_the_whole": (PARTS, Launch(64, 64, 2)),
    "a_share_of_columns_each": (GATE_UP, Launch(128, 64, 3, warpgroups=2)),
    "a_share_of_tokens_each": (GATE_UP, Launch(64, 128, 2, warpgroups=2)),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_the_interpreter_agrees_with_the_definition(case: GemmCase) -> None:
    inputs = OP.build(case, 0)
    assert MOSAIC.refuses("gpu", inputs.args, inputs.static) is None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", mosaic.skinny_gemm), case, inputs)
    assert problem is None, problem


@pytest.mark.parametrize(("case", "choice"), LAUNCHES.values(), ids=LAUNCHES)
def test_all_launches_agree_with_the_definition(case: GemmCase, choice: Launch) -> None:
    launched = partial(mosaic.launched, choice)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", launched), case, OP.build(case, 0))
    assert problem is None, problem


@pytest.mark.parametrize("case", FIT, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: GemmCase) -> None:
    dtype, columns = jnp.dtype(case.dtype), case.outer * (1 + case.swiglu)
    x = jax.ShapeDtypeStruct((case.tokens, case.inner), dtype)
    w = jax.ShapeDtypeStruct((case.inner, columns), dtype)
    static = {"swiglu": case.swiglu, "split": case.split}
    assert select(OP, "gpu", (x, w), static).name == "mosaic"
    step = jax.jit(partial(MOSAIC.fn, **static))
    assert "@mosaic_gpu" in step.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(replace(PLAIN, dtype="float32"), "tokens are float32", id="float32"),
        pytest.param(replace(PLAIN, tokens=257), "257 tokens are not between", id="tokens"),
        pytest.param(replace(PARTS, tokens=257), "257 tokens are not between", id="split_tokens"),
        pytest.param(replace(GATE_UP, tokens=80), "80 tokens are not between", id="swiglu_tokens"),
        pytest.param(replace(PLAIN, tokens=24), "24 tokens are not a multiple of 16", id="uneven"),
        pytest.param(replace(PLAIN, inner=96), "96 or 256 components", id="inner"),
        pytest.param(replace(PLAIN, outer=96), "256 or 96 components", id="outer"),
        pytest.param(PLAIN, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(case: GemmCase, reason: str) -> None:
    inputs = OP.build(case, 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")
