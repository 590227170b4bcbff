"""quantised_mlp: refusals, pins, and the fp8 kernels interpreted by JAX and lowered for Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import Device, compiling_for
from pallas_kernels.pins import Pins
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm.fp8 import launch, mosaic
from pallas_kernels.quantised_mlp.api import OP, quantised_mlp
from pallas_kernels.quantised_mlp.cases import CASES, MlpCase
from pallas_kernels.registry import UnfitKernel, select
from pallas_kernels.testing import mismatch

FP8 = OP.impls[0]
H100 = Device("gpu", "NVIDIA H100", "9.0", num_sms=132)
SMALL = MlpCase("fp8_t72", "fp8", 72, 512, 512)
MANY = replace(SMALL, tokens=264, width=640)  # more than the kernel for few tokens takes


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(SMALL, id="few"),
        pytest.param(
            replace(SMALL, split=True, hidden=2560), marks=pytest.mark.nightly, id="split"
        ),
        pytest.param(MANY, id="many"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_the_interpreter_agrees_with_the_definition(case: MlpCase) -> None:
    inputs = OP.build(case, 0)
    assert select(OP, "gpu", inputs.args, inputs.static).name == "mosaic_fp8"
    exact = replace(OP, tolerance={"bfloat16": 3e-2})  # the interpreter adds in float32
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(exact, FP8, case, inputs)
    assert problem is None, problem


@pytest.mark.parametrize(
    "case", [case for case in CASES if "bench" in case.tags], ids=lambda case: case.name
)
@pytest.mark.usefixtures("on_hopper")
def test_lowered_for_hopper(case: MlpCase) -> None:
    kinds, split = ("fp8", "fp8"), case.split
    of = jax.ShapeDtypeStruct
    rows = ((2 * case.hidden, case.width), (case.width, case.hidden))
    args: list[Any] = [of((case.tokens, case.width), "bfloat16")]
    for outer, inner in rows:
        args += [of((outer, inner), "float8_e4m3fn"), of((outer, 1), "float32"), None, None, None]
    with compiling_for(H100):
        run = partial(mosaic.mlp, kinds=kinds, split=split)
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        declared = launch.mlp_result_shapes(*args, kinds=kinds, split=split)
        assert jax.eval_shape(run, *args) == declared
    # Tokens are quantised, and hidden values by the GEMM that makes them.
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(("tokens", "columns"), [(72, 128), (264, 384)])
def test_scales_have_space_for_all_tokens_of_a_tile(tokens: int, columns: int) -> None:
    # On a device, not in the interpreter, scales past the end of a row are written to the next one.
    of = jax.ShapeDtypeStruct
    args: list[Any] = [of((tokens, 512), "float8_e4m3fn"), of((4, tokens), "float32")]
    args += [of((1280, 512), "float8_e4m3fn"), of((1280, 1), "float32")]
    with compiling_for(H100):
        _, scales = jax.eval_shape(mosaic.swiglu_quantised, *args)
    assert scales.shape == (5, columns)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"tokens": 64}, "64 tokens are not more than 64", id="few_tokens"),
        pytest.param({"form": "int4", "group": 128}, "not fp8", id="int4"),
        pytest.param({"form": "fp8_blocks", "group": 128}, "share a scale", id="blocks"),
        pytest.param({"hidden": 576}, "576 gates are not a multiple of 128", id="gates"),
        pytest.param({"width": 320}, "320 inputs are not", id="inputs"),
        pytest.param({"tokens": 264, "width": 576}, "576 inputs are not", id="outputs"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_refusals(change: Mapping[str, Any], reason: str) -> None:
    inputs = OP.build(replace(SMALL, **change), 0)
    assert reason in (FP8.refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.usefixtures("on_hopper")
def test_a_pin_of_the_matmul_disables_the_fusion() -> None:
    inputs = OP.build(SMALL, 0)
    static = inputs.static | {"pins": Pins((("quantised_gemm", "xla"),))}
    assert select(OP, "gpu", inputs.args, static).name == "unfused"


def _matrices(case: MlpCase) -> tuple[jax.Array, Quantised, Quantised]:
    x, *arrays = OP.build(case, 0).args
    return x, Quantised("fp8", *arrays[:5]), Quantised("fp8", *arrays[5:])


def test_a_pin_reaches_the_matmuls() -> None:
    pins = Pins((("quantised_gemm", "nope"),))
    with pytest.raises(UnfitKernel, match="quantised_gemm has no implementation 'nope'"):
        quantised_mlp(*_matrices(SMALL), pins=pins)


def test_arguments_are_checked() -> None:
    x, gate_up, down = _matrices(SMALL)
    with pytest.raises(ValueError, match=r"tokens \(72, 256\) do not fit 512 inputs"):
        quantised_mlp(x[:, :256], gate_up, down)
    with pytest.raises(ValueError, match="512 outputs are not twice 512 inputs"):
        quantised_mlp(x, down, down)
    assert quantised_mlp(jnp.asarray(x), gate_up, down).shape == x.shape
