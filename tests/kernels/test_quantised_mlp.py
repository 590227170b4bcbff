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

from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import UnfitKernel, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm.fp8 import launch, mosaic
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_mlp.api import OP, MlpArgs, quantised_mlp
from pallas_kernels.quantised_mlp.cases import CASES, MlpCase

FP8 = OP.impls[0]
H100 = Device("gpu", "NVIDIA H100", "9.0", num_sms=132)
SMALL = MlpCase("fp8_t72", "fp8", 72, 512, 512)
MANY = replace(SMALL, tokens=264, width=640)  # more than the kernel for few tokens takes


def _fp8(outer: int, inner: int) -> Quantised:
    of = jax.ShapeDtypeStruct
    return Quantised("fp8", of((outer, inner), "float8_e4m3fn"), of((outer, 1), "float32"))


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
    x: Any = jax.ShapeDtypeStruct((case.tokens, case.width), "bfloat16")
    gate_up, down = _fp8(2 * case.hidden, case.width), _fp8(case.width, case.hidden)
    args = MlpArgs(x=x, gate_up=gate_up, down=down, split=case.split)
    with compiling_for(H100):
        text = jax.jit(mosaic.mlp).trace(args).lower(lowering_platforms=("cuda",)).as_text()
        assert jax.eval_shape(mosaic.mlp, args) == launch.mlp_result_shapes(args)
    # Tokens are quantised, and hidden values by the GEMM that makes them.
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(("tokens", "columns"), [(72, 128), (264, 384)])
def test_scales_have_space_for_all_tokens_of_a_tile(tokens: int, columns: int) -> None:
    # On a device, not in the interpreter, scales past the end of a row are written to the next one.
    of = jax.ShapeDtypeStruct
    x: Any = of((tokens, 512), "float8_e4m3fn")
    sizes = launch.sizes_of(QuantisedGemmArgs(x=x, w=_fp8(1280, 512), swiglu=True))
    run = partial(mosaic.swiglu_quantised, sizes=sizes)
    with compiling_for(H100):
        _, scales = jax.eval_shape(run, x, of((4, tokens), "float32"), _fp8(1280, 512))
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
    (args,) = OP.build(SMALL, 0).args
    pinned = replace(args, pins=Pins((("quantised_gemm", "xla"),)))
    assert select(OP, "gpu", (pinned,), {}).name == "unfused"


def test_a_pin_reaches_the_matmuls() -> None:
    (args,) = OP.build(SMALL, 0).args
    with pytest.raises(UnfitKernel, match="quantised_gemm has no implementation 'nope'"):
        quantised_mlp(replace(args, pins=Pins((("quantised_gemm", "nope"),))))


def test_arguments_are_checked() -> None:
    (args,) = OP.build(SMALL, 0).args
    with pytest.raises(ValueError, match=r"tokens \(72, 256\) do not fit 512 inputs"):
        quantised_mlp(replace(args, x=args.x[:, :256]))
    with pytest.raises(ValueError, match="512 outputs are not twice 512 inputs"):
        quantised_mlp(replace(args, gate_up=args.down))
    assert quantised_mlp(replace(args, x=jnp.asarray(args.x))).shape == args.x.shape
