"""norm_gemm: errors for bad arguments, pins, and the Mosaic kernel of dense weights in JAX's
interpreter and lowered for Hopper; ``test_norm_quantised`` has that of quantised ones.

The interpreter does not model swizzled tiles, so the token is written where it is read. That the
swizzle leaves the first row of a tile in place is tested on a GPU only (the sweep there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import Impl, UnfitKernel, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.norm_gemm import launch, mosaic
from pallas_kernels.norm_gemm.api import OP, NormGemmArgs, norm_gemm
from pallas_kernels.norm_gemm.cases import CASES, NormGemmCase
from pallas_kernels.norm_gemm.launch import NormGemmConfig, NormGemmSizes, choose_config
from pallas_kernels.residual_norm import token
from pallas_kernels.residual_norm.mosaic_launch import COLUMNS, MAX_WIDTH, TILES
from pallas_kernels.residual_norm.ref import NormArgs

MOSAIC = OP.impls[0]
ONE = [case for case in CASES if case.tokens == 1 and case.form is None]
SMALL = [case for case in ONE if "ci" in case.tags]
GATE_UP = NormGemmCase("gate_up", 1, 512, 128, 2, swiglu=True)
LAUNCHES = {
    "as_many_steps_as_stages": (GATE_UP, NormGemmConfig(128, 4)),
    "more_steps_than_stages": (GATE_UP, NormGemmConfig(64, 3)),
    "fewer_steps_than_stages": (replace(GATE_UP, swiglu=False), NormGemmConfig(128, 6)),
    "one_step": (replace(GATE_UP, partials=1), NormGemmConfig(512, 2)),
}
H200 = Device("gpu", "NVIDIA H200", "9.0")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token, "ref_union", lambda plain, swizzled: plain)
    monkeypatch.setattr(token, "views", lambda ref: (ref, ref))


def launch_with(config: NormGemmConfig, args: NormGemmArgs) -> Any:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return mosaic.launch_with(config, args)


def with_chosen_config(args: NormGemmArgs) -> Any:
    return launch_with(choose_config(launch.sizes_of(args)), args)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper", "interpreted")
def test_the_interpreter_agrees_with_the_definition(case: NormGemmCase) -> None:
    inputs = OP.build(case, 0)
    assert MOSAIC.refuses("gpu", inputs.args, inputs.static) is None
    problem = mismatch(OP, Impl("mosaic", with_chosen_config), case, inputs)
    assert problem is None, problem


@pytest.mark.parametrize(("case", "config"), LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.usefixtures("interpreted")
def test_all_configs_agree_with_the_definition(case: NormGemmCase, config: NormGemmConfig) -> None:
    fn = partial(launch_with, config)
    problem = mismatch(OP, Impl("mosaic", fn), case, OP.build(case, 0))
    assert problem is None, problem


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: NormGemmCase) -> None:
    (args,) = OP.build(case, 0).args
    assert select(OP, "gpu", (args,), {}).name == "mosaic"
    text = jax.jit(MOSAIC.fn).trace(args).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param(NormGemmSizes(2560, 6144, False), NormGemmConfig(128, 4), id="qkv"),
        pytest.param(NormGemmSizes(2560, 9728, True), NormGemmConfig(64, 4), id="gate_up"),
        pytest.param(NormGemmSizes(4096, 12288, True), NormGemmConfig(64, 3), id="gate_up_of_8b"),
    ],
)
def test_programs_that_share_a_multiprocessor_fit_into_it(
    sizes: NormGemmSizes, expected: NormGemmConfig
) -> None:
    with compiling_for(H200):
        assert choose_config(sizes) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"tokens": 2}, "2 tokens are not between 1 and 1", id="tokens"),
        pytest.param({"partials": 0}, "there are no partials to add", id="no_parts"),
        pytest.param({"partials": 5, "inner": 4096}, "or more than 16384", id="partials"),
        pytest.param(
            {"dtype": "float32"}, "tokens and weights are float32 and float32", id="dtype"
        ),
        pytest.param({"inner": 576}, "576 components are not a multiple of 512", id="inner"),
        pytest.param({"inner": 4608}, "up to 4096", id="wide"),
        pytest.param({"outer": 96}, "96 columns are not a multiple of 64", id="outer"),
        pytest.param({}, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(change: Mapping[str, Any], reason: str) -> None:
    inputs = OP.build(replace(GATE_UP, **change), 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.parametrize("name", ["residual_norm", "skinny_gemm", "swiglu_gemm"])
@pytest.mark.usefixtures("on_hopper")
def test_a_pin_of_an_unfused_op_disables_the_fusion(name: str) -> None:
    (args,) = OP.build(GATE_UP, 0).args
    pinned = replace(args, pins=Pins(((name, "xla"),)))
    assert select(OP, "gpu", (pinned,), {}).name == "unfused"


@pytest.mark.parametrize("name", ["residual_norm", "swiglu_gemm"])
def test_pins_reach_the_unfused_ops(name: str) -> None:
    norm = NormArgs(x=jnp.ones((2, 8)), weights=jnp.ones((1, 8)), row=0, eps=1e-6)
    pins = Pins(((name, "nope"),))
    with pytest.raises(UnfitKernel, match=f"{name} has no implementation 'nope'"):
        norm_gemm(NormGemmArgs(norm=norm, w=jnp.ones((8, 4)), swiglu=True, pins=pins))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((3, 4))}, r"tokens \(3, 4\) do not fit weights of 8 inputs"),
        ({"weights": jnp.zeros((2, 4))}, r"row 1 of norms \(2, 4\)"),
        ({"row": 2}, r"row 2 of norms \(2, 8\)"),
        ({"partials": jnp.zeros((2, 8))}, r"partials \(2, 8\) do not fit tokens \(3, 8\)"),
        ({"partials": jnp.zeros((3, 8), jnp.bfloat16)}, "are bfloat16, not float32"),
        ({"w": jnp.zeros((8, 5))}, "5 columns are not a gate and an up"),
        ({"w": jnp.zeros((2, 8, 6))}, r"weights \(2, 8, 6\) are not a matrix"),
    ],
)
def test_arguments_are_checked(change: Mapping[str, Any], message: str) -> None:
    given: dict[str, Any] = {"x": jnp.zeros((3, 8)), "weights": jnp.zeros((2, 8)), "row": 1}
    given |= change
    w = given.pop("w", jnp.zeros((8, 6)))
    with pytest.raises(ValueError, match=message):
        norm_gemm(NormGemmArgs(norm=NormArgs(**given, eps=1e-6), w=w, swiglu=True))


@pytest.mark.parametrize("swiglu", [False, True])
def test_two_stages_are_in_flight_for_all_sizes(swiglu: bool) -> None:
    widths = range(TILES * COLUMNS, MAX_WIDTH + 1, TILES * COLUMNS)
    with compiling_for(H200):
        for inner, outer in product(widths, range(COLUMNS, 16385, COLUMNS)):
            config = choose_config(NormGemmSizes(inner, outer, swiglu))
            assert config.stages >= launch.MIN_STAGES, (inner, outer)


def test_one_stage_is_refused() -> None:
    case = replace(SMALL[0], tokens=1)
    inputs = OP.build(case, 0)
    with pytest.raises(ValueError, match=r"NormGemmConfig\(.* has fewer than 2 stages"):
        launch_with(NormGemmConfig(64, 1), *inputs.args)
