"""swiglu_gemm: errors for bad arguments, configurations fit an SM, and the Mosaic kernel in JAX's
interpreter and lowered for Hopper.

The interpreter cannot reshape a Ref: ``_wgmma`` is replaced by one wgmma for each half.
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
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.skinny_gemm import launch as skinny_launch
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.swiglu_gemm import launch, mosaic
from pallas_kernels.swiglu_gemm.api import OP, swiglu_gemm
from pallas_kernels.swiglu_gemm.cases import CASES, SwigluCase
from pallas_kernels.swiglu_gemm.launch import SwigluConfig, SwigluSizes

MOSAIC = OP.impls[0]
MIXED_STEP = SwigluCase("qwen3_4b_t2080", 2080, 2560, 9728)  # 32 decode rows with a chunk
ON_GPU = [case for case in CASES if "gpu" in case.tags]
QWEN3_4B = SwigluSizes(8192, 2560, 9728)
SMALL = SwigluCase("small", 512, 128, 256)
LAUNCHES = {
    "one_tile_per_cta": (replace(SMALL, tokens=256), SwigluConfig(128, 128, 64, 2, 1, 8)),
    "tile_after_tile": (replace(SMALL, tokens=640), SwigluConfig(128, 128, 64, 2, 1, 2)),
    "more_stages_than_steps": (
        replace(SMALL, dtype="float16"),
        SwigluConfig(128, 64, 128, 3, 1, 2),
    ),
    "tokens_overhang": (SwigluCase("odd", 600, 320, 192), SwigluConfig(256, 64, 64, 3, 1, 2)),
    "geglu": (replace(SMALL, tokens=128, outer=64, gelu=True), SwigluConfig(128, 64, 64, 2, 1, 8)),
    "a_cluster_shares_weights": (SMALL, SwigluConfig(128, 128, 64, 2, 2, 2)),
    "the_first_warpgroup_leads": (
        replace(SMALL, inner=256),
        SwigluConfig(128, 128, 64, 4, 2, 2, lead=2),
    ),
    "half_a_cluster_overhangs": (replace(SMALL, tokens=640), SwigluConfig(128, 64, 64, 3, 2, 1)),
    "gates_and_ups_in_two_wgmmas": (
        SwigluCase("wide", 256, 128, 320),
        SwigluConfig(128, 160, 32, 3, 2, 1),
    ),
    "columns_overhang": (SwigluCase("odd", 256, 128, 256), SwigluConfig(128, 96, 32, 3, 1, 1)),
    "wide_columns_overhang": (
        SwigluCase("odd", 256, 128, 192),
        SwigluConfig(128, 160, 64, 2, 1, 1),
    ),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)
    monkeypatch.setattr(skinny_launch, "not_hopper", lambda: None)


def _wgmma(sums: tuple[Any, ...], x: Any, w: Any) -> None:
    width = w.shape[2]
    for half in range(2):
        total, start = (sums[0], half * width) if len(sums) == 1 else (sums[half], 0)
        plgpu.wgmma(total.at[:, start : start + width], x, w.at[:, half])


@pytest.mark.parametrize(("case", "config"), LAUNCHES.values(), ids=LAUNCHES)
def test_the_interpreter_agrees_with_the_definition(
    case: SwigluCase, config: SwigluConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "_wgmma", _wgmma)
    small = Device("gpu", "few SMs", "9.0", num_sms=4)
    launch_with = partial(mosaic.launch_with, config)
    with compiling_for(small), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", launch_with), case, OP.build(case, 0))
    assert problem is None, problem


@pytest.mark.parametrize(
    ("w", "message"),
    [
        pytest.param((32, 8), "do not fit weights", id="inner"),
        pytest.param((16, 9), "9 columns are not a gate and an up", id="odd"),
    ],
)
def test_arguments_that_do_not_fit(w: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swiglu_gemm(GemmArgs(x=jnp.zeros((3, 16)), w=jnp.zeros(w), swiglu=True))


def test_arguments_without_swiglu() -> None:
    with pytest.raises(ValueError, match="swiglu_gemm: .* a GEMM without swiglu"):
        swiglu_gemm(GemmArgs(x=jnp.zeros((3, 16)), w=jnp.zeros((16, 8))))


def _call(case: SwigluCase) -> tuple[GemmArgs]:
    dtype = jnp.dtype(case.dtype)
    x: Any = jax.ShapeDtypeStruct((case.tokens, case.inner), dtype)
    w: Any = jax.ShapeDtypeStruct((case.inner, 2 * case.outer), dtype)
    return (GemmArgs(x=x, w=w, swiglu=True, gelu=case.gelu),)


@pytest.mark.parametrize("case", [*ON_GPU, MIXED_STEP], ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: SwigluCase) -> None:
    call = _call(case)
    assert select(OP, "gpu", call, {}).name == "mosaic"
    text = jax.jit(MOSAIC.fn).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text
    assert "stablehlo.transpose" not in text, "XLA copies the weights"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [pytest.param(32, "skinny_gemm", id="few"), pytest.param(72, "xla", id="between")],
)
@pytest.mark.usefixtures("on_hopper")
def test_other_implementations_for_fewer_tokens(tokens: int, name: str) -> None:
    assert select(OP, "gpu", _call(replace(ON_GPU[0], tokens=tokens)), {}).name == name


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(replace(SMALL, dtype="float32"), "tokens are float32", id="float32"),
        pytest.param(replace(SMALL, tokens=120), "120 tokens are below 128", id="few"),
        pytest.param(replace(SMALL, tokens=513), "513 tokens are not a multiple of 8", id="uneven"),
        pytest.param(replace(SMALL, inner=96), "96 or 256 components", id="inner"),
        pytest.param(replace(SMALL, outer=96), "128 or 96 components", id="outer"),
        pytest.param(SMALL, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(case: SwigluCase, reason: str) -> None:
    assert reason in (MOSAIC.refuses("gpu", _call(case), {}) or "")


@pytest.mark.parametrize(
    ("tokens", "config"),
    [
        pytest.param(
            8192, SwigluConfig(128, 128, 64, 4, 1, 16, 1), id="large_tiles_without_clusters"
        ),
        pytest.param(2080, SwigluConfig(128, 128, 64, 4, 1, 16, 1), id="no_pair_overhangs"),
        pytest.param(512, SwigluConfig(128, 64, 64, 6, 2, 8, 2), id="small_tiles_leave_less_idle"),
        pytest.param(256, SwigluConfig(128, 160, 32, 6, 2, 8, 0), id="wide_tiles_in_one_wave"),
        pytest.param(128, SwigluConfig(128, 96, 64, 5, 1, 16, 0), id="narrow_tiles_in_one_wave"),
    ],
)
def test_heuristic(tokens: int, config: SwigluConfig) -> None:
    assert launch.heuristic_config(QWEN3_4B._replace(tokens=tokens)) == config


@pytest.mark.parametrize(
    "sizes",
    [
        *(pytest.param(launch.shapes_of(case), id=case.name) for case in ON_GPU),
        pytest.param(QWEN3_4B._replace(outer=3 * 64), id="odd_columns"),
        pytest.param(QWEN3_4B._replace(inner=64), id="one_step"),
    ],
)
def test_heuristic_configs_fit(sizes: SwigluSizes) -> None:
    assert launch.heuristic_config(sizes).fits(sizes)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SwigluConfig(128, 128, 96, 4, 1, 8), id="rest_of_inner"),
        pytest.param(SwigluConfig(64, 128, 64, 4, 1, 8), id="half_a_warpgroup"),
        pytest.param(SwigluConfig(128, 256, 64, 2, 1, 8), id="too_wide"),
        pytest.param(SwigluConfig(128, 80, 64, 4, 1, 8), id="too_few_lanes"),
        pytest.param(SwigluConfig(256, 128, 64, 2, 1, 8), id="too_many_accumulators"),
        pytest.param(SwigluConfig(128, 128, 64, 5, 1, 8), id="too_much_shared_memory"),
        pytest.param(SwigluConfig(128, 128, 64, 1, 1, 8), id="one_stage_would_deadlock"),
        pytest.param(SwigluConfig(128, 128, 64, 4, 3, 8), id="cluster"),
        pytest.param(SwigluConfig(128, 128, 64, 4, 1, 8, lead=4), id="leads_by_all_stages"),
    ],
)
def test_configs_that_do_not_fit(config: SwigluConfig) -> None:
    assert not config.fits(QWEN3_4B)


def test_a_lead_requires_tiles_of_at_least_as_many_steps_as_stages() -> None:
    config = SwigluConfig(128, 128, 64, 4, 1, 8, lead=1)
    assert config.fits(QWEN3_4B._replace(inner=4 * 64))
    assert not config.fits(QWEN3_4B._replace(inner=3 * 64))


def test_a_tuned_choice_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"block_t": 128, "block_n": 64, "block_k": 64, "stages": 6, "cluster": 2, "group": 4}
    monkeypatch.setattr(launch.tuned, "read_choices", lambda file: {"qwen3_4b_t8192": config})
    assert launch.choose_config(QWEN3_4B) == SwigluConfig(**config)
    other = QWEN3_4B._replace(tokens=8448)
    assert launch.choose_config(other) == launch.heuristic_config(other)
