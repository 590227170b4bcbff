"""quantised_gemm in Mosaic without a GPU: right in JAX's interpreter, and lowered for Hopper.

What the interpreter cannot do with registers is replaced (``kit.tiled_shims``).
"""

from __future__ import annotations

import os
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
from pallas_kernels.harness.registry import select
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.quantised import Quantised, dequantised
from pallas_kernels.quantised_gemm.api import OP
from pallas_kernels.quantised_gemm.cases import QuantisedCase
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs
from pallas_kernels.quantised_gemm.tiled import arrange, fragments, launch, mosaic
from pallas_kernels.quantised_gemm.tiled.large import launch as large_launch
from pallas_kernels.quantised_gemm.tiled.large import mosaic as large
from pallas_kernels.quantised_gemm.tiled.launch import TiledConfig
from pallas_kernels.skinny_gemm.ref import GemmArgs, skinny_gemm

# Of XLA's thread pool. A warpgroup of the interpreter that waits for a barrier keeps one.
THREADS = int(os.environ.get("NPROC", os.cpu_count() or 1))
H100 = Device("gpu", "NVIDIA H100", "9.0", num_sms=132)
FORMS = (
    ("int4", 128),
    ("int4", 512),
    ("int4", 64),
    ("int4_zeros", 128),
    ("int4_offsets", 32),
    ("q4_k", 32),
    ("int8", 32),
    ("int8_offsets", 32),
    ("q5_k", 32),
    ("q6_k", 16),
    ("fp4", 32),
    ("mxfp4", 32),
)
NIGHTLY = ("int8", "q5_k", "q5_k_t512")  # of LARGE and LOWERED; others contain their parts
# Every byte but the two that are NaN.
E4M3 = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter would start a thread for each warp, see THREADS.
    monkeypatch.setattr(mosaic, "in_one_warp", lambda run: run())
    replace_registers(monkeypatch)


def _marked(cases: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Parameters of the cases, some of them for nightly runs."""
    nightly = {name: pytest.mark.nightly for name in NIGHTLY}
    return [pytest.param(*one, marks=nightly.get(name, ()), id=name) for name, one in cases.items()]


def _built(case: QuantisedCase) -> tuple[QuantisedGemmArgs, QuantisedGemmArgs]:
    """The arguments of a case, and those with the weights arranged."""
    (args,) = OP.build(case, 0).args
    return args, replace(args, w=arrange.arrange(args.w))


def _run(case: QuantisedCase, config: TiledConfig | None = None) -> tuple[Any, Any]:
    """The result in the interpreter and the definition's."""
    args, tiled = _built(case)
    with compiling_for(H100):
        configs = launch.configs(launch.sizes_of(tiled))
    chosen = config or next(each for each in configs if each.warpgroups < 4)
    if chosen.warpgroups == 4 and THREADS < 8:
        pytest.skip(f"five warpgroups that wait for each other need more than {THREADS} threads")
    run = jax.jit(partial(mosaic.launch_with, chosen))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        result = OP.observable(run(jax.tree.map(jnp.asarray, tiled)))
    return result, _definition(args, rounded=chosen.scales)


def _definition(args: QuantisedGemmArgs, *, rounded: bool) -> jax.Array:
    """The op's definition; kernels that scale weights round these to bfloat16, those with supers
    and no offsets before supers multiply.
    """
    if not rounded:
        return OP.ref(args)  # type: ignore[no-any-return]
    matrix, supers = args.w, np.ones((1, 1), np.float32)
    if matrix.supers is not None and matrix.offsets is None:
        super_group = matrix.num_inputs // matrix.supers.shape[1]
        supers = np.repeat(matrix.supers[:, :, 0].astype(np.float32), super_group, axis=1)
        matrix = replace(matrix, supers=np.ones_like(matrix.supers))
    w = dequantised(matrix).astype(jnp.bfloat16).astype(jnp.float32) * supers
    dense = GemmArgs(x=args.x, w=w.T, bias=args.bias, swiglu=args.swiglu, wide=args.wide)
    return skinny_gemm(dense)


def _check(case: QuantisedCase, config: TiledConfig | None = None) -> None:
    result, expected = _run(case, config)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    # Weights are exact, or rounded in both, so only sums and the result are rounded.
    bound = 1e-5 if case.wide else 8e-3
    if config is not None and config.integers:
        bound = max(bound, 3e-4)  # 16 bits of tokens
    result, expected = (np.asarray(x, np.float64) for x in (result, expected))
    np.testing.assert_allclose(result, expected, rtol=bound, atol=bound)


def _case(form: str, group: int, tokens: int, **more: Any) -> QuantisedCase:
    name = f"{form}_g{group}_t{tokens}"
    return QuantisedCase(name, form, tokens, 512, 128, group, dtype="bfloat16", **more)


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize("tokens", [3, pytest.param(16, marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("replaced")
def test_every_form_agrees_with_the_definition(form: str, group: int, tokens: int) -> None:
    _check(_case(form, group, tokens))


@pytest.mark.usefixtures("replaced")
def test_every_value_of_e4m3_is_exact() -> None:
    values = np.resize(E4M3, (64, 64)).view(jnp.float8_e4m3fn)
    tile = arrange.arrange(Quantised("fp8", values, np.ones((64, 1), np.float32))).values
    operand = fragments.operand("fp8", jnp.asarray(tile), 0.0)
    np.testing.assert_array_equal(operand.astype(jnp.float32), values.astype(np.float32))


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
@pytest.mark.parametrize(("form", "group"), [("int4", 128), ("q4_k", 32)])
@pytest.mark.usefixtures("replaced")
def test_numbers_of_tokens(form: str, group: int, tokens: int) -> None:
    _check(_case(form, group, tokens))


PLAIN = replace(_case("int4", 128, 8), inner=1280)
LAUNCHES = {
    "one_warpgroup": (PLAIN, TiledConfig(8, 128, 1, 3)),
    "four_warpgroups": (replace(PLAIN, inner=1024), TiledConfig(8, 128, 4, 2)),
    "own_copies": (replace(PLAIN, inner=2048), TiledConfig(8, 128, 4, 2, own_copies=True)),
    "own_copies_split": (
        replace(PLAIN, inner=1280, split=True),
        TiledConfig(8, 128, 2, 2, 2, own_copies=True),
    ),
    "own_copies_of_one": (PLAIN, TiledConfig(8, 128, 1, 3, own_copies=True)),
    "one_step": (replace(PLAIN, inner=256), TiledConfig(8, 128, 2, 2)),
    "half_steps": (replace(PLAIN, inner=1216, group=64), TiledConfig(8, 64, 1, 4)),
    "uneven_split_k": (replace(PLAIN, split=True), TiledConfig(8, 128, 2, 2, split_k=3)),
    "split_offsets": (
        replace(_case("int4_offsets", 32, 16), split=True),
        TiledConfig(16, 128, 2, 2, split_k=2),
    ),
    "swiglu": (replace(PLAIN, swiglu=True), TiledConfig(8, 128, 2, 3)),
    "gates_and_ups_apart": (replace(PLAIN, swiglu=True), TiledConfig(8, 128, 2, 3, 1, True)),
    "both_apart": (replace(PLAIN, swiglu=True), TiledConfig(8, 128, 4, 2, 1, True)),
    "q4_k_apart": (_case("q4_k", 32, 32, swiglu=True), TiledConfig(32, 128, 2, 2, 1, True)),
    "head": (_case("q5_k", 32, 16, wide=True), TiledConfig(16, 128, 1, 2)),
    "swiglu_zeros": (_case("int4_zeros", 128, 8, swiglu=True), TiledConfig(8, 128, 2, 3)),
    "swiglu_q4_k": (_case("q4_k", 32, 64, swiglu=True), TiledConfig(64, 128, 2, 2)),
    "swiglu_q6_k": (_case("q6_k", 16, 24, swiglu=True), TiledConfig(24, 128, 2, 2)),
    "two_tiles_of_tokens": (replace(PLAIN, tokens=72), TiledConfig(64, 128, 2, 2)),
    "supers_of_128": (
        replace(_case("q4_k", 32, 16, split=True), super_group=128),
        TiledConfig(16, 128, 2, 2, split_k=2),
    ),
    "supers_of_128_q6_k": (
        replace(_case("q6_k", 16, 8), super_group=128),
        TiledConfig(8, 128, 2, 2),
    ),
    "parts_of_words": (_case("q4_k", 32, 8), TiledConfig(8, 64, 2, 2)),  # and of records
    "scaled_parts_of_words": (_case("q4_k", 32, 16), TiledConfig(16, 64, 2, 2, scales=True)),
    "scaled_integers": (
        replace(_case("q6_k", 16, 16, split=True), super_group=128),
        TiledConfig(16, 128, 2, 2, split_k=2, scales=True),
    ),
    "group_of_several_steps": (
        replace(PLAIN, group=512, inner=1024),
        TiledConfig(8, 64, 2, 2),
    ),
}


@pytest.mark.parametrize(("case", "config"), LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.usefixtures("replaced")
def test_all_configs_agree_with_the_definition(case: QuantisedCase, config: TiledConfig) -> None:
    _check(case, config)


BIASED = replace(_case("q4_k", 32, 3), bias=True)
INTEGERS = {
    "one_token": (_case("q4_k", 32, 1), TiledConfig(8, 128, 2, 2, integers=True)),
    "bias": (BIASED, TiledConfig(8, 128, 1, 2, integers=True)),
    "four_tokens": (_case("q4_k", 32, 4), TiledConfig(8, 64, 2, 2, integers=True)),
    "swiglu": (
        _case("q4_k", 32, 3, swiglu=True),
        TiledConfig(8, 128, 2, 2, 1, True, integers=True),
    ),
    "split": (
        replace(_case("q6_k", 16, 2), inner=1280, split=True),
        TiledConfig(8, 64, 2, 2, split_k=2, integers=True),
    ),
    "wide": (_case("q6_k", 16, 4, wide=True), TiledConfig(8, 128, 1, 2, integers=True)),
    "supers_of_128": (
        replace(_case("q4_k", 32, 2), super_group=128),
        TiledConfig(8, 128, 2, 2, integers=True),
    ),
    "zeros": (_case("int4_zeros", 128, 2), TiledConfig(8, 64, 2, 2, integers=True)),
    "int4": (_case("int4", 128, 2), TiledConfig(8, 128, 2, 2, integers=True)),
    "int8_offsets": (_case("int8_offsets", 32, 2), TiledConfig(8, 128, 1, 2, integers=True)),
}


@pytest.mark.parametrize(("case", "config"), INTEGERS.values(), ids=INTEGERS)
@pytest.mark.usefixtures("replaced")
def test_tokens_as_integers(case: QuantisedCase, config: TiledConfig) -> None:
    _check(case, config)


@pytest.mark.usefixtures("replaced")
def test_few_gates_and_ups_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[launch.TiledSizes] = []

    def chosen(sizes: launch.TiledSizes) -> TiledConfig:
        calls.append(sizes)
        return next(one for one in launch.configs(sizes) if one.warpgroups < 4)

    monkeypatch.setattr(mosaic, "choose_config", chosen)
    args, tiled = _built(_case("int4", 128, 8, swiglu=True))
    with compiling_for(H100), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        result = mosaic.quantised_gemm.__wrapped__(jax.tree.map(jnp.asarray, tiled))
    assert [(one.split, one.swiglu, one.outer) for one in calls] == [(True, False, 256)]
    assert chosen(calls[0]).split_k > 1
    assert (result.shape, result.dtype) == ((8, 128), jnp.bfloat16)
    result, expected = (np.asarray(x, np.float64) for x in (result, OP.ref(args)))
    np.testing.assert_allclose(result, expected, rtol=8e-3, atol=8e-3)
    with compiling_for(H100):
        wide = launch.sizes_of(tiled)._replace(outer=17 * 64)
        assert not wide.is_narrow


def test_k_forms_have_one_more_split_where_it_saves_a_step() -> None:
    def chosen(form: str, group: int, inner: int) -> TiledConfig:
        case = replace(_case(form, group, 64, split=True), inner=inner)
        sizes = launch.sizes_of(_call(case))._replace(outer=1536)  # 24 tiles on 132 SMs
        return launch.choose_config(sizes)

    with compiling_for(H100):
        assert chosen("q4_k", 32, 8960).split_k == chosen("q6_k", 16, 8960).split_k == 5
        assert chosen("int4", 128, 8960).split_k == 4  # 35 steps of each CTA's 256 inputs
        assert chosen("q6_k", 16, 1536).split_k == 4  # six steps: 2 of the fullest CTA either way
        assert chosen("q4_k", 32, 1536).warpgroups == 4


MANY = replace(_case("int4", 128, 136), outer=256)
LARGE = {
    "ragged": (MANY, 1),
    "cluster": (MANY, 2),
    "swiglu": (replace(MANY, tokens=128, swiglu=True), 1),
    "swiglu_cluster": (replace(MANY, swiglu=True), 2),
    "zeros": (replace(MANY, form="int4_zeros"), 2),
    "bias": (replace(MANY, bias=True), 1),
    "q4_k": (replace(MANY, form="q4_k", group=32, tokens=128), 2),
    "supers_of_128": (replace(MANY, form="q4_k", group=32, super_group=128), 1),
    "q6_k": (replace(MANY, form="q6_k", group=16, tokens=72), 1),
    "int8": (replace(MANY, form="int8", group=32, tokens=72), 1),
    "int8_offsets": (replace(MANY, form="int8_offsets", group=32, tokens=72), 1),
    "q5_k": (replace(MANY, form="q5_k", group=32, tokens=72), 1),
    "fp4": (replace(MANY, form="fp4", group=32, tokens=72), 1),
}


@pytest.mark.parametrize(("case", "cluster"), _marked(LARGE))
@pytest.mark.parametrize("num_sms", [2, pytest.param(132, marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("replaced")
def test_many_tokens(case: QuantisedCase, cluster: int, num_sms: int) -> None:
    args, tiled = _built(case)
    with compiling_for(replace(H100, num_sms=num_sms)):
        config = large_launch.choose_config(large_launch.sizes_of(tiled))
        run = jax.jit(partial(large.launch_with, replace(config, cluster=cluster)))
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
            result = np.asarray(run(jax.tree.map(jnp.asarray, tiled)), np.float64)
    expected = np.asarray(_definition(args, rounded=config.step.scales), np.float64)
    np.testing.assert_allclose(result, expected, rtol=8e-3, atol=8e-3)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


def _call(case: QuantisedCase) -> QuantisedGemmArgs:
    """The arguments of a case with arranged weights, as shapes."""
    _, tiled = _built(case)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiled)


LOWERED = {
    "one_token": (_case("int4", 128, 1), "tiled"),
    "swiglu_t32": (_case("int4", 128, 32, swiglu=True), "tiled"),
    "swiglu_t64": (_case("int4_zeros", 128, 64, swiglu=True), "tiled"),
    "split_t8": (_case("q4_k", 32, 8, split=True), "tiled"),
    "int8_t64": (_case("int8", 32, 64), "tiled"),
    "q5_k_t64": (_case("q5_k", 32, 64), "tiled"),
    "head_t16": (_case("int8_offsets", 32, 16, wide=True), "tiled"),
    "q6_k_t16": (_case("q6_k", 16, 16), "tiled"),
    "fp4_t128": (_case("fp4", 32, 128), "tiled"),
    "t256": (_case("int4", 128, 256), "tiled_large"),
    "swiglu_t1024": (_case("int4", 128, 1024, swiglu=True), "tiled_large"),
    "q4_k_t512": (_case("q4_k", 32, 512), "tiled_large"),
    "q5_k_t512": (_case("q5_k", 32, 512), "tiled_large"),
    "q6_k_t512": (_case("q6_k", 16, 512), "tiled_large"),
}


@pytest.mark.parametrize(("case", "name"), _marked(LOWERED))
@pytest.mark.usefixtures("on_hopper")
def test_chosen_and_lowered_for_hopper(case: QuantisedCase, name: str) -> None:
    args = _call(case)
    with compiling_for(H100):
        assert select(OP, "gpu", (args,), {}).name == name
        run = {"tiled": mosaic, "tiled_large": large}[name].quantised_gemm.__wrapped__
        text = jax.jit(run).trace(args).lower(lowering_platforms=("cuda",))
        shapes = {"tiled": launch, "tiled_large": large_launch}[name].result_shapes
        returned, declared = jax.eval_shape(run, args), shapes(args)
    assert "@mosaic_gpu" in text.as_text()
    assert (declared.shape, declared.dtype) == (returned.shape, returned.dtype)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"dtype": "float32"}, "tokens are float32, not bfloat16", id="float32"),
        pytest.param({"tokens": 20}, "20 tokens are not a multiple of 8", id="tokens"),
        pytest.param({"tokens": 136}, "136 tokens are not between 1 and 128", id="many"),
        pytest.param({"inner": 768, "group": 96}, "groups of 96 inputs do not fit", id="group"),
        pytest.param({}, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str) -> None:
    args = _call(replace(_case("int4", 128, 8), **change))
    assert reason in (launch.supports(args) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"tokens": 64}, "64 tokens are fewer than 129", id="few"),
        pytest.param({"tokens": 204}, "204 tokens are not a multiple of 8", id="tokens"),
        pytest.param({"wide": True}, "the result is bfloat16", id="wide"),
        pytest.param({"outer": 192}, "192 outputs or 512 inputs are not a multiple", id="outer"),
        pytest.param({"dtype": "float32"}, "tokens are float32, not bfloat16", id="float32"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_refusals_of_the_kernel_for_many_tokens(change: dict[str, Any], reason: str) -> None:
    args = _call(replace(MANY, **change))
    assert reason in (large_launch.supports(args) or "")


def test_scales_of_blocks_are_refused() -> None:
    args = _call(_case("fp8_blocks", 128, 8))
    assert launch.supports(args) == "scales are those of blocks of 128 outputs"


def test_weights_that_are_not_arranged_are_refused() -> None:
    args, _ = _built(_case("int4", 128, 8))
    assert launch.supports(args) == "int4 weights are not arranged in tiles"


@pytest.mark.parametrize(
    ("tokens", "swiglu", "config"),
    [
        pytest.param(4, False, TiledConfig(8, 128, 4, 4, integers=True), id="integers"),
        pytest.param(4, True, TiledConfig(8, 256, 2, 4, 1, True, integers=True), id="gates"),
        pytest.param(8, False, TiledConfig(8, 128, 4, 4), id="more_tokens"),
        pytest.param(16, False, TiledConfig(16, 128, 4, 4), id="four_warpgroups"),
        pytest.param(16, True, TiledConfig(16, 128, 2, 6, 1, True), id="gates_and_ups"),
        pytest.param(64, True, TiledConfig(64, 128, 2, 3, 1, True, True), id="two_ctas_per_sm"),
        pytest.param(64, False, TiledConfig(64, 128, 2, 4), id="many_tokens"),
    ],
)
def test_heuristic(tokens: int, swiglu: bool, config: TiledConfig) -> None:
    args = _call(replace(_case("int4", 128, tokens, swiglu=swiglu), inner=2560))
    with compiling_for(H100):
        assert launch.choose_config(launch.sizes_of(args)) == config


def test_heuristic_of_many_tokens_fills_the_sms() -> None:
    sizes = launch.TiledSizes("int4", 1024, 4096, 2560, 128, 0, False, False, False, False)
    with compiling_for(H100):
        assert large_launch.choose_config(sizes).step.block_t == 96  # 220 tiles in two waves
        longer = sizes._replace(tokens=8192)
        assert large_launch.choose_config(longer).step.block_t == 160
