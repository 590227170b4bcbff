"""skinny_gemm in Mosaic without a GPU: right in JAX's interpreter, and lowered for Hopper.

Configurations are listed by hand, since the heuristic has few for small matrices.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.harness.registry import Impl, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.skinny_gemm import launch, mosaic
from pallas_kernels.skinny_gemm.api import OP, GemmArgs
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase
from pallas_kernels.skinny_gemm.launch import GemmConfig

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
SPLIT = replace(PLAIN, name="split", split=True)
LAUNCHES = {
    "one_step": (replace(PLAIN, inner=64), GemmConfig(64, 64, 2)),
    "fewer_steps_than_stages": (PLAIN, GemmConfig(64, 128, 4)),
    "uneven_split_k": (replace(SPLIT, tokens=1, inner=320), GemmConfig(64, 64, 2, split_k=3)),
    "split_k_with_bias": (replace(SPLIT, bias=True), GemmConfig(64, 64, 2, split_k=2)),
    "split_k_of_one": (SPLIT, GemmConfig(64, 64, 2)),
    "warpgroups_divide_columns": (GATE_UP, GemmConfig(128, 64, 3, warpgroups=2)),
    "warpgroups_divide_tokens": (GATE_UP, GemmConfig(64, 128, 2, warpgroups=2)),
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


@pytest.mark.parametrize(("case", "config"), LAUNCHES.values(), ids=LAUNCHES)
def test_all_configs_agree_with_the_definition(case: GemmCase, config: GemmConfig) -> None:
    launch_with = partial(mosaic.launch_with, config)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", launch_with), case, OP.build(case, 0))
    assert problem is None, problem


@pytest.mark.parametrize("case", FIT, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: GemmCase) -> None:
    dtype, columns = jnp.dtype(case.dtype), case.outer * (1 + case.swiglu)
    x: Any = jax.ShapeDtypeStruct((case.tokens, case.inner), dtype)
    w: Any = jax.ShapeDtypeStruct((case.inner, columns), dtype)
    bias: Any = jax.ShapeDtypeStruct((columns,), dtype) if case.bias else None
    args = GemmArgs(x=x, w=w, bias=bias, swiglu=case.swiglu, split=case.split)
    assert select(OP, "gpu", (args,), {}).name == "mosaic"
    text = jax.jit(MOSAIC.fn).trace(args).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(replace(PLAIN, dtype="float32"), "tokens are float32", id="float32"),
        pytest.param(replace(PLAIN, tokens=257), "257 tokens are not between", id="tokens"),
        pytest.param(replace(SPLIT, tokens=257), "257 tokens are not between", id="split_tokens"),
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
