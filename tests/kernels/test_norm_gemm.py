"""norm_gemm: arguments are checked, pins are heeded, and its Mosaic kernel is right in JAX's
interpreter and lowered for Hopper.

The interpreter knows no swizzled tiles, so that the token is written where it is read. That the
first row of such a tile lies as if it were not swizzled shows on a GPU alone (the sweep there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device, described
from pallas_kernels.norm_gemm import launch, mosaic
from pallas_kernels.norm_gemm.api import OP, norm_gemm
from pallas_kernels.norm_gemm.cases import CASES, NormGemmCase
from pallas_kernels.norm_gemm.launch import Launch, Sizes, choose
from pallas_kernels.pins import Pins
from pallas_kernels.registry import Impl, Inputs, UnfitKernel, select
from pallas_kernels.testing import mismatch

MOSAIC = OP.impls[0]
ONE = [case for case in CASES if case.tokens == 1]
SMALL = [case for case in ONE if "ci" in case.tags]
GATE_UP = NormGemmCase("gate_up", 1, 512, 128, 2, swiglu=True)
LAUNCHES = {
    "as_many_steps_as_stages": (GATE_UP, Launch(128, 4)),
    "more_steps_than_stages": (GATE_UP, Launch(64, 3)),
    "fewer_steps_than_stages": (replace(GATE_UP, swiglu=False), Launch(128, 6)),
    "one_step": (replace(GATE_UP, parts=1), Launch(512, 2)),
}
H200 = Device("gpu", "NVIDIA H200", "9.0")


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "_one_room", lambda plain, swizzled: plain)
    monkeypatch.setattr(mosaic, "_both_views", lambda room: (room, room))


def launched(choice: Launch, *args: Any, pins: Pins, **static: Any) -> Any:
    """The kernel as an implementation is called."""
    del pins
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return mosaic.launched(choice, *args, **static)


def chosen(*args: Any, **static: Any) -> Any:
    sizes = launch.sizes_of(args[0], args[3], swiglu=static["swiglu"])
    return launched(choose(sizes), *args, **static)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper", "interpreted")
def test_the_interpreter_agrees_with_the_definition(case: NormGemmCase) -> None:
    inputs = OP.build(case, 0)
    assert MOSAIC.refuses("gpu", inputs.args, inputs.static) is None
    problem = mismatch(OP, Impl("mosaic", chosen), case, inputs)
    assert problem is None, problem


@pytest.mark.parametrize(("case", "choice"), LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.usefixtures("interpreted")
def test_all_launches_agree_with_the_definition(case: NormGemmCase, choice: Launch) -> None:
    def fn(*args: Any, **static: Any) -> Any:
        return launched(choice, *args, **static)

    problem = mismatch(OP, Impl("mosaic", fn), case, OP.build(case, 0))
    assert problem is None, problem


def abstract(inputs: Inputs) -> list[Any]:
    return [x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs.args]


@pytest.mark.parametrize("case", ONE, ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: NormGemmCase) -> None:
    inputs = OP.build(case, 0)
    args, static = abstract(inputs), inputs.static
    assert select(OP, "gpu", tuple(args), static).name == "mosaic"
    step = jax.jit(lambda *args: MOSAIC.fn(*args, **static))
    assert "@mosaic_gpu" in step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param(Sizes(2560, 6144, False), Launch(128, 4), id="qkv"),
        pytest.param(Sizes(2560, 9728, True), Launch(64, 4), id="gate_up"),
        pytest.param(Sizes(4096, 12288, True), Launch(64, 3), id="gate_up_of_8b"),
    ],
)
def test_programs_that_share_a_multiprocessor_fit_into_it(sizes: Sizes, expected: Launch) -> None:
    with described(H200):
        assert choose(sizes) == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"tokens": 2}, "there are 2 tokens, not one", id="tokens"),
        pytest.param({"parts": 0}, "there are no parts to add", id="no_parts"),
        pytest.param({"parts": 5}, "or more than 4", id="parts"),
        pytest.param({"dtype": "float32"}, "float32, float32 and float32", id="dtype"),
        pytest.param({"inner": 576}, "576 components are not a multiple of 512", id="inner"),
        pytest.param({"inner": 4608}, "up to 4096", id="wide"),
        pytest.param({"outer": 96}, "96 columns not of 64", id="outer"),
        pytest.param({}, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(change: Mapping[str, Any], reason: str) -> None:
    inputs = OP.build(replace(GATE_UP, **change), 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.parametrize("name", ["residual_norm", "skinny_gemm", "swiglu_gemm"])
@pytest.mark.usefixtures("on_hopper")
def test_a_pin_of_what_it_stands_for_is_heeded(name: str) -> None:
    inputs = OP.build(GATE_UP, 0)
    static = inputs.static | {"pins": Pins(((name, "xla"),))}
    assert select(OP, "gpu", inputs.args, static).name == "apart"


@pytest.mark.parametrize("name", ["residual_norm", "swiglu_gemm"])
def test_a_pin_reaches_the_steps(name: str) -> None:
    x, norms, w = jnp.ones((2, 8)), jnp.ones((1, 8)), jnp.ones((8, 4))
    with pytest.raises(UnfitKernel, match=f"{name} has no implementation 'nope'"):
        norm_gemm(x, None, norms, w, row=0, eps=1e-6, swiglu=True, pins=Pins(((name, "nope"),)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((3, 4))}, r"tokens \(3, 4\) do not fit weights \(8, 6\)"),
        ({"norms": jnp.zeros((2, 4))}, r"row 1 of norms \(2, 4\)"),
        ({"row": 2}, r"row 2 of norms \(2, 8\)"),
        ({"parts": jnp.zeros((2, 8))}, r"parts \(2, 8\) do not fit tokens \(3, 8\)"),
        ({"parts": jnp.zeros((3, 8), jnp.bfloat16)}, "are bfloat16, not float32"),
        ({"w": jnp.zeros((8, 5))}, "5 columns are not a gate and an up"),
    ],
)
def test_arguments_are_checked(change: Mapping[str, Any], message: str) -> None:
    given = {"x": jnp.zeros((3, 8)), "parts": None, "norms": jnp.zeros((2, 8))}
    given |= {"w": jnp.zeros((8, 6)), "row": 1, "eps": 1e-6, "swiglu": True}
    with pytest.raises(ValueError, match=message):
        norm_gemm(**(given | change))
