"""swiglu_gemm: its arguments are checked, its launches fit the chip, its Mosaic kernel is right in
JAX's interpreter and lowered for Hopper.

The interpreter sees no reference in another shape: ``_multiply`` is replaced by one for each half.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device, described
from pallas_kernels.registry import Impl, select
from pallas_kernels.skinny_gemm import launch as few_launch
from pallas_kernels.swiglu_gemm import launch, mosaic
from pallas_kernels.swiglu_gemm.api import OP, swiglu_gemm
from pallas_kernels.swiglu_gemm.cases import CASES, SwigluCase
from pallas_kernels.swiglu_gemm.launch import Launch, Sizes
from pallas_kernels.testing import mismatch

MOSAIC = OP.impls[0]
MIXED = SwigluCase("qwen3_4b_t2080", 2080, 2560, 9728)  # 32 rows that decode beside a chunk
BENCHED = [case for case in CASES if "gpu" in case.tags]
QWEN3_4B = Sizes(8192, 2560, 9728)
SMALL = SwigluCase("small", 512, 128, 256)
LAUNCHES = {
    "a_tile_for_each_program": (replace(SMALL, tokens=256), Launch(128, 128, 64, 2, 1, 8)),
    "tile_after_tile": (replace(SMALL, tokens=640), Launch(128, 128, 64, 2, 1, 2)),
    "more_stages_than_steps": (replace(SMALL, dtype="float16"), Launch(128, 64, 128, 3, 1, 2)),
    "tokens_overhang": (SwigluCase("odd", 600, 320, 192), Launch(256, 64, 64, 3, 1, 2)),
    "a_cluster_shares_weights": (SMALL, Launch(128, 128, 64, 2, 2, 2)),
    "the_first_worker_leads": (replace(SMALL, inner=256), Launch(128, 128, 64, 4, 2, 2, lead=2)),
    "half_a_cluster_overhangs": (replace(SMALL, tokens=640), Launch(128, 64, 64, 3, 2, 1)),
    "gates_then_ups": (SwigluCase("wide", 256, 128, 320), Launch(128, 160, 32, 3, 2, 1)),
    "columns_overhang": (SwigluCase("odd", 256, 128, 256), Launch(128, 96, 32, 3, 1, 1)),
    "wide_columns_overhang": (SwigluCase("odd", 256, 128, 192), Launch(128, 160, 64, 2, 1, 1)),
}


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)
    monkeypatch.setattr(few_launch, "not_hopper", lambda: None)


def _multiply(sums: tuple[Any, ...], x: Any, w: Any) -> None:
    width = w.shape[2]
    for half in range(2):
        total, start = (sums[0], half * width) if len(sums) == 1 else (sums[half], 0)
        plgpu.wgmma(total.at[:, start : start + width], x, w.at[:, half])


@pytest.mark.parametrize(("case", "choice"), LAUNCHES.values(), ids=LAUNCHES)
def test_the_interpreter_agrees_with_the_definition(
    case: SwigluCase, choice: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic, "_multiply", _multiply)
    small = Device("gpu", "of few multiprocessors", "9.0", multiprocessors=4)
    launched = partial(mosaic.launched, choice)
    with described(small), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", launched), case, OP.build(case, 0))
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
        swiglu_gemm(jnp.zeros((3, 16)), jnp.zeros(w))


def _call(case: SwigluCase) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    dtype = jnp.dtype(case.dtype)
    x = jax.ShapeDtypeStruct((case.tokens, case.inner), dtype)
    return x, jax.ShapeDtypeStruct((case.inner, 2 * case.outer), dtype)


@pytest.mark.parametrize("case", [*BENCHED, MIXED], ids=lambda case: case.name)
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
def test_others_for_fewer_tokens(tokens: int, name: str) -> None:
    assert select(OP, "gpu", _call(replace(BENCHED[0], tokens=tokens)), {}).name == name


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
    ("tokens", "choice"),
    [
        pytest.param(8192, Launch(128, 128, 64, 4, 1, 16, 1), id="large_tiles_alone"),
        pytest.param(2080, Launch(128, 128, 64, 4, 1, 16, 1), id="no_pair_overhangs"),
        pytest.param(512, Launch(128, 64, 64, 6, 2, 8, 2), id="small_tiles_leave_less_idle"),
        pytest.param(256, Launch(128, 160, 32, 6, 2, 8, 0), id="wide_tiles_in_one_turn"),
        pytest.param(128, Launch(128, 96, 64, 5, 1, 16, 0), id="narrow_tiles_in_one_turn"),
    ],
)
def test_rule(tokens: int, choice: Launch) -> None:
    assert launch.by_rule(QWEN3_4B._replace(tokens=tokens)) == choice


@pytest.mark.parametrize(
    "sizes",
    [
        *(pytest.param(launch.shapes_of(case), id=case.name) for case in BENCHED),
        pytest.param(QWEN3_4B._replace(outer=3 * 64), id="odd_columns"),
        pytest.param(QWEN3_4B._replace(inner=64), id="one_step"),
    ],
)
def test_the_rule_cuts_up(sizes: Sizes) -> None:
    assert launch.by_rule(sizes).cuts_up(sizes)


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(Launch(128, 128, 96, 4, 1, 8), id="rest_of_inner"),
        pytest.param(Launch(64, 128, 64, 4, 1, 8), id="half_a_worker"),
        pytest.param(Launch(128, 256, 64, 2, 1, 8), id="too_wide"),
        pytest.param(Launch(128, 80, 64, 4, 1, 8), id="too_few_lanes"),
        pytest.param(Launch(256, 128, 64, 2, 1, 8), id="too_many_sums"),
        pytest.param(Launch(128, 128, 64, 5, 1, 8), id="too_much_shared_memory"),
        pytest.param(Launch(128, 128, 64, 1, 1, 8), id="one_stage_waits_for_itself"),
        pytest.param(Launch(128, 128, 64, 4, 3, 8), id="cluster"),
        pytest.param(Launch(128, 128, 64, 4, 1, 8, lead=4), id="leads_by_all_there_is"),
    ],
)
def test_choices_that_do_not_cut_up(choice: Launch) -> None:
    assert not choice.cuts_up(QWEN3_4B)


def test_a_lead_wants_tiles_of_more_steps_than_are_on_their_way() -> None:
    choice = Launch(128, 128, 64, 4, 1, 8, lead=1)
    assert choice.cuts_up(QWEN3_4B._replace(inner=4 * 64))
    assert not choice.cuts_up(QWEN3_4B._replace(inner=3 * 64))


def test_a_tuned_choice_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"block_t": 128, "block_n": 64, "block_k": 64, "stages": 6, "cluster": 2, "group": 4}
    monkeypatch.setattr(launch.tuned, "read_choices", lambda file: {"qwen3_4b_t8192": choice})
    assert launch.choose(QWEN3_4B) == Launch(**choice)
    other = QWEN3_4B._replace(tokens=8448)
    assert launch.choose(other) == launch.by_rule(other)
