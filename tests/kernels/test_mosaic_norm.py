"""residual_norm in Mosaic without a GPU: right in JAX's interpreter, and lowered for Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.harness.registry import Impl, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.residual_norm import mosaic, mosaic_launch
from pallas_kernels.residual_norm.api import OP
from pallas_kernels.residual_norm.cases import CASES, NormCase
from pallas_kernels.residual_norm.ref import NormArgs

MOSAIC = next(impl for impl in OP.impls if impl.name == "mosaic")
STEPS = [case for case in CASES if case.name.startswith("qwen3_4b_t") and case.tokens <= 256]
GEMM_OUTPUTS = [case for case in STEPS if case.partials == 1]
SMALL = NormCase("gemm_output", 3, 512, 1, "bfloat16")
INTERPRETED = (
    SMALL,
    replace(SMALL, name="product_f16", dtype="float16"),
    replace(SMALL, name="one_token_parts2", tokens=1, width=1024, partials=2),
    replace(SMALL, name="parts3_f16", tokens=2, width=1536, partials=3, dtype="float16"),
    replace(SMALL, name="widest_parts4", tokens=2, width=4096, partials=4),
)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_launch, "not_hopper", lambda: None)


@pytest.mark.parametrize("case", [*INTERPRETED, GEMM_OUTPUTS[0]], ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_the_interpreter_agrees_with_the_definition(case: NormCase) -> None:
    inputs = OP.build(case, 0)
    assert MOSAIC.refuses("gpu", inputs.args, inputs.static) is None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("mosaic", mosaic.residual_norm), case, inputs)
    assert problem is None, problem


def _call(case: NormCase) -> NormArgs:
    """A case's arguments as shapes."""
    (args,) = OP.build(case, 0).args
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


@pytest.mark.parametrize("case", [*INTERPRETED, *GEMM_OUTPUTS], ids=lambda case: case.name)
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: NormCase) -> None:
    args = _call(case)
    assert select(OP, "gpu", (args,), {}).name == "mosaic"
    traced = jax.jit(MOSAIC.fn).trace(args)
    assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", [*INTERPRETED, *GEMM_OUTPUTS], ids=lambda case: case.name)
def test_declared_result_shapes_are_right(case: NormCase) -> None:
    args = _call(case)
    returned = jax.eval_shape(mosaic.residual_norm, args)
    declared = mosaic_launch.result_shapes(args)
    assert [(x.shape, x.dtype) for x in declared] == [(x.shape, x.dtype) for x in returned]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"dtype": "float32"}, "tokens are float32, not one of bfloat16", id="dtype"),
        pytest.param({"partials": 0}, "there are no partials to add", id="no_parts"),
        pytest.param({"partials": 5, "width": 4096}, "or more than 16384", id="partials"),
        pytest.param({"tokens": 257}, "257 tokens are not between 1 and 256", id="tokens"),
        pytest.param({"width": 576}, "576 components are not a multiple of 512", id="width"),
        pytest.param({"width": 4608}, "4608 components are not a multiple", id="wide"),
        pytest.param({}, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(change: Mapping[str, Any], reason: str) -> None:
    inputs = OP.build(replace(SMALL, **change), 0)
    assert reason in (MOSAIC.refuses("gpu", inputs.args, inputs.static) or "")


def test_weights_of_another_dtype_are_refused() -> None:
    (args,) = OP.build(SMALL, 0).args
    found = mosaic_launch.supports(replace(args, weights=args.weights.astype("float16")))
    assert found == "norms are float16, not bfloat16 or float32"
