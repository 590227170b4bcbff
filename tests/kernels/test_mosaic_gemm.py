"""skinny_gemm in Mosaic without a GPU: right in JAX's interpreter, and lowered for Hopper.

What a launch may be is tried by hand, as the rule's choices for small matrices are few.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.registry import Impl, select
from pallas_kernels.skinny_gemm import mosaic, mosaic_launch
from pallas_kernels.skinny_gemm.api import OP
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase
from pallas_kernels.skinny_gemm.mosaic_launch import Launch, by_rule, parts_for
from pallas_kernels.skinny_gemm.sizes import Sizes
from pallas_kernels.testing import mismatch

MOSAIC = next(impl for impl in OP.impls if impl.name == "mosaic")
BY_NAME = {case.name: case for case in CASES}
BARE = [case for case in CASES if "_bare_" in case.name or case.parts > 1]
INTERPRETED = [case for case in BARE if case.inner == 576]

GATE_UP = GemmCase("gate_up", 16, 256, 256, swiglu=True, arrivals=False, dtype="bfloat16")
PLAIN = replace(GATE_UP, name="plain", swiglu=False)
LAUNCHES = {
    "one_step": (replace(PLAIN, inner=64), Launch(64, 64, 2)),
    "fewer_steps_than_stages": (PLAIN, Launch(64, 128, 4)),
    "uneven_parts": (replace(PLAIN, tokens=1, inner=320, parts=3), Launch(64, 64, 2)),
    "a_share_of_columns_each": (GATE_UP, Launch(128, 64, 3, warpgroups=2)),
    "a_share_of_tokens_each": (GATE_UP, Launch(64, 128, 2, warpgroups=2)),
    "cluster": (replace(PLAIN, inner=512, parts=2), Launch(64, 64, 2, cluster=2)),
    "cluster_of_8_tokens": (replace(GATE_UP, tokens=8), Launch(64, 64, 2, cluster=4)),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_launch, "not_hopper", lambda: None)


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
    def launched(x: jax.Array, w: jax.Array, *_: Any, eps: float, **static: Any) -> jax.Array:
        return mosaic.launched(choice, x, w, **static)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", launched), case, OP.build(case, 0))
    assert problem is None, problem


@pytest.mark.parametrize("case", BARE, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: GemmCase) -> None:
    dtype, columns = jnp.dtype(case.dtype), case.outer * (1 + case.swiglu)
    x = jax.ShapeDtypeStruct((case.tokens, case.inner), dtype)
    w = jax.ShapeDtypeStruct((case.inner, columns), dtype)
    args: tuple[Any, ...] = (x, w, None, None, None)
    static = {"eps": 0.0, "swiglu": case.swiglu, "parts": case.parts}
    assert select(OP, "gpu", args, static).name == "mosaic"
    step = jax.jit(partial(MOSAIC.fn, **static))
    assert "@mosaic_gpu" in step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(replace(PLAIN, norm=True), "neither normalises", id="norm"),
        pytest.param(replace(PLAIN, residual=True), "nor adds a residual", id="residual"),
        pytest.param(replace(PLAIN, dtype="float32"), "tokens are float32", id="float32"),
        pytest.param(replace(PLAIN, tokens=257), "257 tokens are not between", id="tokens"),
        pytest.param(replace(PLAIN, tokens=12), "12 tokens are not a multiple of 8", id="uneven"),
        pytest.param(replace(PLAIN, inner=96), "96 or 256 components", id="inner"),
        pytest.param(replace(PLAIN, outer=96), "256 or 96 components", id="outer"),
        pytest.param(replace(PLAIN, parts=5), "too few for 5 parts", id="parts"),
        pytest.param(PLAIN, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(case: GemmCase, reason: str) -> None:
    inputs = OP.build(case, 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        pytest.param(Sizes(8, 9728, 2560, False, False, "bfloat16"), 3, id="down"),
        pytest.param(Sizes(8, 2560, 6144, False, False, "bfloat16"), 1, id="qkv"),
        pytest.param(Sizes(8, 2560, 9728, False, True, "bfloat16"), 1, id="gate_up"),
        pytest.param(Sizes(8, 64, 64, False, False, "bfloat16"), 1, id="one_step"),
    ],
)
def test_parts(sizes: Sizes, parts: int) -> None:
    assert parts_for(sizes) == parts


@pytest.mark.parametrize("case", BARE, ids=lambda case: case.name)
def test_the_rule_fits_the_chip(case: GemmCase) -> None:
    choice = by_rule(case.sizes, case.parts)
    steps, tiles = case.inner // choice.block_k, case.outer // choice.block_n
    assert choice.stages >= 2 and steps >= case.parts and tiles % choice.cluster == 0
    assert steps * choice.block_k == case.inner and tiles * choice.block_n == case.outer
    columns = choice.block_n * (1 + case.swiglu) + max(case.tokens, 8)
    assert choice.stages * choice.block_k * columns * 2 <= 224 << 10
