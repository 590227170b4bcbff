"""norm_gemm with quantised weights: in JAX's interpreter, lowered for Hopper, and each op alone.

The interpreter does not model swizzled tiles, so the token is written where it is read; what it
cannot do with registers is replaced (``kit.tiled_shims``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kit.tiled_shims import replace_registers
from pallas_kernels.harness.pins import Pins
from pallas_kernels.harness.registry import UnfitKernel, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.norm_gemm import launch
from pallas_kernels.norm_gemm.api import OP, NormGemmArgs, norm_gemm
from pallas_kernels.norm_gemm.cases import CASES, NormGemmCase
from pallas_kernels.quantised_gemm.fp8 import launch as fp8_launch
from pallas_kernels.quantised_gemm.fp8 import mosaic as fp8_mosaic
from pallas_kernels.quantised_gemm.tiled import launch as tiled_launch
from pallas_kernels.quantised_gemm.tiled import mosaic
from pallas_kernels.quantised_gemm.tiled.launch import TiledConfig
from pallas_kernels.residual_norm import token

IMPLS = {impl.name: impl for impl in OP.impls}
H100 = Device("gpu", "NVIDIA H100", "9.0", num_sms=132)
QKV = NormGemmCase("qkv", 1, 1536, 128, 3, form="int4", group=128)
GATE_UP = NormGemmCase("gate_up", 1, 512, 128, 2, swiglu=True, form="int4", group=128)
LAUNCHES = {
    "one_warpgroup": (QKV, TiledConfig(8, 128, 1, 3)),
    # Two warpgroups divide three spans: the last one is computed twice.
    "two_warpgroups": (QKV, TiledConfig(8, 128, 2, 3)),
    "more_stages_than_steps": (replace(QKV, inner=512), TiledConfig(8, 128, 2, 4)),
    "output_in_bfloat16": (replace(QKV, partials=1), TiledConfig(8, 64, 2, 2)),
    "own_copies": (QKV, TiledConfig(8, 128, 2, 2, own_copies=True)),
    "swiglu": (GATE_UP, TiledConfig(8, 128, 2, 2)),
    "gates_and_ups_apart": (GATE_UP, TiledConfig(8, 128, 2, 3, by_half=True)),
    "zeros": (replace(QKV, form="int4_zeros"), TiledConfig(8, 128, 2, 3)),
    "chunks_of_32": (replace(QKV, form="q4_k", group=32), TiledConfig(8, 128, 2, 2)),
    "chunks_of_16": (replace(QKV, form="q6_k", group=16), TiledConfig(8, 128, 2, 2)),
    "mxfp4": (replace(GATE_UP, form="mxfp4", group=32), TiledConfig(8, 128, 2, 2)),
}
FP8 = [
    replace(QKV, name="fp8", form="fp8", group=0),
    replace(QKV, name="fp8_in_bfloat16", form="fp8", group=0, partials=1, inner=512),
    replace(GATE_UP, name="fp8_gate_up", form="fp8", group=0, inner=1024),
    replace(GATE_UP, name="fp8_blocks", form="fp8_blocks"),
    replace(QKV, name="fp8_of_16", form="fp8", group=0, tokens=16, bias=True),
    replace(QKV, name="fp8_of_3_in_bfloat16", form="fp8", group=0, partials=1, inner=512, tokens=3),
    replace(GATE_UP, name="fp8_blocks_of_72", form="fp8_blocks", tokens=72),
]
OF_MODELS = [case for case in CASES if case.form and case.inner > 2048]
TILED = [case for case in OF_MODELS if not case.name.count("fp8")]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic, "in_one_warp", lambda run: run())
    monkeypatch.setattr(token, "ref_union", lambda plain, swizzled: plain)
    monkeypatch.setattr(token, "views", lambda ref: (ref, ref))
    replace_registers(monkeypatch)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_launch, "not_hopper", lambda: None)
    monkeypatch.setattr(fp8_launch, "not_hopper", lambda: None)


@pytest.mark.parametrize(("case", "config"), LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.usefixtures("replaced")
def test_all_configs_agree_with_the_definition(case: NormGemmCase, config: TiledConfig) -> None:
    inputs = OP.build(case, 0)
    run = jax.jit(partial(mosaic.launch_normed, config))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        total, out = run(*jax.tree.map(jnp.asarray, inputs.args))
    expected_total, expected = OP.ref(*inputs.args)
    np.testing.assert_array_equal(total, expected_total)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    # A norm may be rounded the other way; weights are exact.
    out, expected = (np.asarray(one, np.float64) for one in (out, expected))
    np.testing.assert_allclose(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("case", FP8, ids=lambda case: case.name)
@pytest.mark.usefixtures("replaced", "on_hopper")
def test_fp8_agrees_with_its_definition(case: NormGemmCase) -> None:
    inputs, fp8 = OP.build(case, 0), IMPLS["mosaic_fp8"]
    assert select(OP, "gpu", inputs.args, inputs.static).name == "mosaic_fp8"
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, fp8, case, inputs)
    assert problem is None, problem


def _marked(case: NormGemmCase) -> Any:
    """A parameter; the larger matrices take seconds to draw."""
    marks = pytest.mark.nightly if case.name.startswith("qwen3_8b") else ()
    return pytest.param(case, id=case.name, marks=marks)


def _abstract(case: NormGemmCase) -> NormGemmArgs:
    (args,) = OP.build(case, 0).args
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


@pytest.mark.parametrize("case", [*map(_marked, OF_MODELS)])
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: NormGemmCase) -> None:
    args = _abstract(case)
    with compiling_for(H100):
        name = "mosaic_fp8" if "fp8" in case.name else "tiled"
        assert select(OP, "gpu", (args,), {}).name == name
        run = {"tiled": mosaic, "mosaic_fp8": fp8_mosaic}[name].norm_gemm.__wrapped__
        lowered = jax.jit(run).trace(args).lower(lowering_platforms=("cuda",))
        declared, returned = launch.result_shapes(args), jax.eval_shape(run, args)
    assert "@mosaic_gpu" in lowered.as_text()
    assert [(x.shape, x.dtype) for x in declared] == [(x.shape, x.dtype) for x in returned]


@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
def test_shared_memory_of_a_multiprocessor_suffices(case: NormGemmCase) -> None:
    """Gates and ups have more CTAs than there are SMs, so two of them share one."""
    args = _abstract(case)
    with compiling_for(H100):
        sizes = tiled_launch.sizes_of(args.gemm(args.norm.x), normed=True)
        config = tiled_launch.choose_config(sizes)
    values = sizes.halves * config.block_k // 64 * sizes.tile_bytes
    assert config.stages >= 3
    ctas = 2 if case.swiglu else 1
    assert ctas * (config.stages * values + sizes.token_bytes) < 224 << 10


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"tokens": 2}, "2 tokens are not between 1 and 1", id="tokens"),
        pytest.param({"partials": 0}, "there are no partials to add", id="no_parts"),
        pytest.param({"inner": 640}, "640 components are not a multiple of 512", id="inner"),
        pytest.param({"form": None}, "the weights are not quantised", id="dense"),
        pytest.param({}, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(change: Mapping[str, Any], reason: str) -> None:
    inputs = OP.build(replace(QKV, **change), 0)
    assert reason in (IMPLS["tiled"].refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.parametrize("name", ["residual_norm", "quantised_gemm"])
@pytest.mark.usefixtures("on_hopper")
def test_a_pin_of_an_unfused_op_disables_the_fusion(name: str) -> None:
    (args,) = OP.build(QKV, 0).args
    pinned = replace(args, pins=Pins(((name, "xla"),)))
    assert select(OP, "gpu", (pinned,), {}).name == "unfused"


def test_a_pin_reaches_the_matmul() -> None:
    (args,) = OP.build(replace(QKV, partials=0), 0).args
    with pytest.raises(UnfitKernel, match="quantised_gemm has no implementation 'nope'"):
        norm_gemm(replace(args, pins=Pins((("quantised_gemm", "nope"),))))


def test_weights_must_fit() -> None:
    (args,) = OP.build(replace(QKV, partials=0), 0).args
    narrow = replace(args.norm, x=args.norm.x[:, :512])
    with pytest.raises(ValueError, match=r"tokens \(1, 512\) do not fit weights of 1536 inputs"):
        norm_gemm(replace(args, norm=narrow))
