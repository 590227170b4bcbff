"""experts on Hopper without a GPU: right in JAX's interpreter, and lowered for Hopper.

The Triton kernels that sort tokens are replaced by their definitions; ``test_experts_sort`` tests
them. What the interpreter cannot do with registers is replaced (``kit.tiled_shims``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kit.tiled_shims import replace_registers
from pallas_kernels.experts import cases, hopper, launch, tiles, triton
from pallas_kernels.experts.api import OP
from pallas_kernels.experts.cases import ExpertsCase
from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import GEGLU, PLAIN, Activation
from pallas_kernels.gemm import tiles as gemm_tiles
from pallas_kernels.harness.registry import Impl, select
from pallas_kernels.harness.testing import mismatch
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.quantised_gemm.cases import BLOCK
from pallas_kernels.quantised_gemm.tiled import step

HOPPER = next(impl for impl in OP.impls if impl.name == "hopper")
CASES = {case.name: case for case in cases.CASES}
BF16 = replace(CASES["seven_experts_bf16"], count=5)
TILES = replace(CASES["int4_tiles"], width=64, inner=64, count=3, chosen=2, tokens=2)
K_FORM: Any = {"width": 256, "inner": 256}  # whole blocks of 256 inputs in both GEMMs
# Two tiles of outputs an item; in the last item of down one is missing.
PAIRS: Any = {"width": 192, "inner": 256}
MANY = launch.FEW_TOKENS + 1
INTERPRETED = {
    "one_token": replace(BF16, tokens=1),
    "outside": replace(BF16, tokens=33, load="holes"),
    "biases": replace(BF16, tokens=9, biases=True, activation=cases.CLAMPED),
    "bounded": replace(BF16, tokens=9, activation=cases.BOUNDED),
    "geglu": replace(BF16, tokens=1, width=64, activation=GEGLU),
    "odd_steps": replace(BF16, tokens=40, width=128, inner=320, count=3, chosen=2),
    "one_expert_has_all": replace(BF16, tokens=24, load="few", count=3),
    "many_of_few": CASES["holes_bf16_t100"],
    "several_steps": replace(BF16, tokens=8, width=320, inner=192),
    "prompt": replace(BF16, tokens=MANY, load="holes", split=False),
    "prompt_few_experts": replace(BF16, tokens=150, count=3, load="few", inner=128),
    "geglu_prompt": replace(BF16, tokens=MANY, activation=GEGLU),
    "prompt_biases": replace(BF16, tokens=MANY, biases=True, activation=cases.CLAMPED),
    "int4": TILES,
    "geglu_int4": replace(TILES, activation=GEGLU),
    "int4_sorted": replace(TILES, tokens=17, load="holes", inner=128),
    "int4_zeros": replace(TILES, form="int4_zeros", group=64, width=128),
    "int4_offsets": replace(TILES, form="int4_offsets", inner=128),
    "q4_k": replace(TILES, form="q4_k", chosen=1, **K_FORM),
    "q4_k_many_of_few": replace(TILES, form="q4_k", tokens=100, load="holes", **K_FORM),
    "int8": replace(TILES, form="int8"),
    "int8_offsets": replace(TILES, form="int8_offsets", tokens=17),
    "q5_k": replace(TILES, form="q5_k", **K_FORM),
    "q6_k": replace(TILES, form="q6_k", group=16, **K_FORM),
    "mxfp4": replace(TILES, form="mxfp4", biases=True, activation=cases.CLAMPED, **PAIRS),
    "mxfp4_many_of_few": CASES["mxfp4_tiles_t100"],
    "fp4": replace(TILES, form="fp4"),
    "fp8": replace(TILES, form="fp8", group=0),
    "fp8_blocks": replace(TILES, form="fp8_blocks", group=128, width=256, inner=128),
    "fp8_blocks_many_of_few": CASES["fp8_blocks_tiles_t100"],
    "fp8_prompt": replace(TILES, form="fp8", group=0, tokens=MANY),
    "fp8_blocks_prompt": CASES["fp8_blocks_tiles_t200"],
    "geglu_int4_prompt": replace(TILES, tokens=MANY, activation=GEGLU),
    "int4_prompt": replace(TILES, tokens=MANY, load="holes"),
    "int4_offsets_prompt": replace(TILES, form="int4_offsets", tokens=MANY, load="holes"),
    "q4_k_prompt": replace(TILES, form="q4_k", tokens=200, **K_FORM),
    "int8_offsets_prompt": replace(TILES, form="int8_offsets", tokens=MANY),
    "int4_zeros_prompt": replace(TILES, tokens=MANY, form="int4_zeros", group=64, load="holes"),
    "int8_prompt": replace(TILES, tokens=MANY, form="int8", split=False),
    "q6_k_prompt": replace(TILES, tokens=MANY, form="q6_k", group=16, **K_FORM),
    "fp4_prompt": replace(TILES, tokens=MANY, form="fp4"),
    "mxfp4_prompt": replace(TILES, tokens=MANY, form="mxfp4", biases=True, width=128),
}
NIGHTLY = (
    *("geglu_prompt", "geglu_int4", "geglu_int4_prompt", "gemma4_26b_t1024"),
    *("fp8", "fp8_prompt", "fp8_blocks_many_of_few", "qwen3_30b_fp8_t8192"),
    *("several_steps", "one_expert_has_all", "prompt_few_experts", "int4", "int4_zeros", "int8"),
    *("int4_prompt", "fp4", "fp4_prompt", "qwen3_30b_t1024", "qwen3_30b_int4_t64"),
    *("int4_offsets", "int8_offsets", "q4_k_many_of_few", "q5_k", "q6_k"),
    *("int4_zeros_prompt", "int8_prompt", "q6_k_prompt", "int8_offsets_prompt"),
)
LOWERED = (
    *("qwen3_30b_t1", "qwen3_30b_t1024", "qwen3_30b_int4_t64", "gpt_oss_20b_fp4_t8192"),
    *("qwen3_30b_fp8_t8", "qwen3_30b_fp8_t8192"),
    *("gemma4_26b_t8", "gemma4_26b_t1024"),
)


def _marked(names: Iterable[str]) -> list[Any]:
    """Parameters of the names, some of them for nightly runs."""
    nightly = {name: pytest.mark.nightly for name in NIGHTLY}
    return [pytest.param(name, marks=nightly.get(name, ()), id=name) for name in names]


def _spread(x: jax.Array, place: jax.Array, num_rows: int) -> jax.Array:
    tokens = jnp.repeat(x, place.shape[1], axis=0)
    rows = jnp.full((num_rows, x.shape[1]), jnp.nan, x.dtype)
    return rows.at[place.reshape(-1)].set(tokens, mode="drop")


def _gather(rows: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
    found = rows.astype(jnp.float32).at[place].get(mode="fill", fill_value=0.0)
    return jnp.sum(found * weights[..., None], axis=1).astype(rows.dtype)


@pytest.fixture
def sorted_by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "tiles_of", tiles.tiles_of)
    monkeypatch.setattr(triton, "spread", _spread)
    monkeypatch.setattr(triton, "gather", _gather)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter would start a thread for each warp.
    monkeypatch.setattr(plgpu, "warp_map", lambda run: run(jnp.int32(0)))
    few_sms = SimpleNamespace(num_sms=3)  # so that CTAs compute several items
    for module in (gemm_tiles, launch):
        monkeypatch.setattr(module, "current_device", lambda: few_sms)
    replace_registers(monkeypatch)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


@pytest.mark.parametrize("name", _marked(INTERPRETED))
@pytest.mark.usefixtures("sorted_by_definition", "replaced", "on_hopper")
def test_the_interpreter_agrees_with_the_definition(name: str) -> None:
    case = INTERPRETED[name]
    inputs = OP.build(case, 0)
    assert HOPPER.refuses("gpu", inputs.args, inputs.static) is None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("hopper", hopper.experts), case, inputs)
    assert problem is None, problem


@pytest.mark.usefixtures("sorted_by_definition", "replaced", "on_hopper")
def test_a_tokens_bits_do_not_depend_on_the_order() -> None:
    """It is in another row of its tile."""
    (args,) = OP.build(INTERPRETED["biases"], 0).args
    run = jax.jit(hopper.experts)
    order = np.random.default_rng(1).permutation(len(args.x))
    tokens = {name: getattr(args, name)[order] for name in ("x", "choices", "weights")}
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        whole = np.asarray(run(args))  # [T, D], or by choices [k, T, D]
        shuffled = np.asarray(run(replace(args, **tokens)))
    np.testing.assert_array_equal(shuffled, whole[..., order, :])


def _shapes(case: ExpertsCase) -> ExpertsArgs:
    """The arguments of a case's call, without their values."""
    tokens, count, d, f = case.tokens, case.count, case.width, case.inner
    of, dtype = jax.ShapeDtypeStruct, jnp.dtype(case.dtype)
    kind = case.kind + "_tiles" * (case.form != PLAIN)

    def stack(outer: int, inner: int) -> Any:
        if case.form == PLAIN:
            return of((count, outer, inner), dtype)
        if case.kind == "fp8":
            scales = (count, outer // BLOCK, inner // BLOCK)
            values = of((count, outer, inner), jnp.float8_e4m3fn)
            return Quantised(kind, values, of(scales, jnp.float32))
        values = of((count, outer, inner // 2), jnp.uint8)
        scale = jnp.bfloat16 if case.form == "mxfp4" else jnp.float16
        return Quantised(kind, values, of((count, outer, inner // case.group), scale))

    bias = [of((count, size), dtype) if case.biases else None for size in (2 * f, d)]
    choices = [of((tokens, case.chosen), kind) for kind in (jnp.int32, jnp.float32)]
    args: dict[str, Any] = {
        "x": of((tokens, d), dtype),
        "choices": choices[0],
        "weights": choices[1],
        "gate_up": stack(2 * f, d),
        "down": stack(d, f),
        "gate_up_bias": bias[0],
        "down_bias": bias[1],
    }
    return ExpertsArgs(**args, activation=case.activation, split=case.split)


@pytest.mark.parametrize("name", _marked(LOWERED))
@pytest.mark.usefixtures("sorted_by_definition", "on_hopper")
def test_chosen_and_lowered_for_hopper(name: str) -> None:
    args = _shapes(CASES[name])
    assert select(OP, "gpu", (args,), {}).name == "hopper"
    text = jax.jit(hopper.experts).trace(args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.usefixtures("sorted_by_definition", "on_hopper")
def test_factors_are_loaded_before_the_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load after the last matmul may be overtaken by the next copy: no interpreter shows it."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **static: Any) -> Any:
            calls.append(name)
            return function(*args, **static)

        return call

    monkeypatch.setattr(step.plgpu, "wgmma", noted("wgmma", step.plgpu.wgmma))
    for name in ("factor", "given"):
        monkeypatch.setattr(step.Step, name, noted(name, getattr(step.Step, name)))
    for tokens in (40, 200):  # sizes that no other test has traced
        args = _shapes(replace(CASES["qwen3_30b_int4_t64"], tokens=tokens))
        jax.jit(hopper.experts).trace(args)
        assert calls.count("wgmma") >= 2
        assert re.fullmatch("((factor )+(wgmma )+)+", "".join(f"{name} " for name in calls))
        calls.clear()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        pytest.param(replace(BF16, dtype="float32"), "tokens are float32", id="float32"),
        pytest.param(replace(BF16, width=96), "96 or 64 components", id="width"),
        pytest.param(replace(TILES, tiled=False), "int4 weights are not arranged", id="by_rows"),
        pytest.param(replace(BF16, form="fp8", group=0), "fp8 weights are not", id="fp8"),
        pytest.param(
            replace(TILES, group=96, width=192, inner=192, tokens=MANY),
            "no K steps fit",
            id="group",
        ),
        pytest.param(
            replace(CASES["fp8_blocks_tiles"], width=192, inner=64, group=64),
            "blocks of",
            id="blocks",
        ),
        pytest.param(BF16, "compute capability none, not 9.x", id="device"),
    ],
)
def test_refusals(case: ExpertsCase, reason: str) -> None:
    inputs = OP.build(case, 0)
    assert reason in (HOPPER.refuses("gpu", inputs.args, inputs.static) or "")


@pytest.mark.parametrize(("tokens", "warpgroups"), [(8, 4), (64, 2)])
def test_warpgroups_of_scaled_sums(tokens: int, warpgroups: int) -> None:
    """With 32 columns four compute warpgroups would spill registers."""
    fp8 = launch.Tiled("fp8", 128, 0, zeros=False, offsets=False, block=128)
    columns = launch.width_of(tokens, 8, 16, (fp8, fp8))
    sizes = (16, 2048, 7168, 1, tokens, 8, 64, columns, False, None, "bfloat16")
    config = launch.quantised_decode_config(launch.GemmSizes(*sizes, fp8))
    assert config is not None and config.warpgroups == warpgroups


@pytest.mark.parametrize(
    ("tokens", "rows"), [(256, 64), (512, 96), (768, 128), (1024, 160), (8192, 128)]
)
def test_rows_of_a_prompts_tile(tokens: int, rows: int) -> None:
    """One tile holds most experts' rows, or the unused rows of the last of many cost little."""
    mxfp4 = launch.Tiled("fp4", 32, 0, zeros=False, offsets=False, scales_weights=True)
    assert launch.width_of(tokens, 4, 32, (mxfp4, mxfp4)) == rows  # as timed for gpt-oss-20b
    fp8 = mxfp4._replace(kind="fp8", group=128, scales_weights=False, block=128)
    assert launch.width_of(tokens, 4, 32, (fp8, fp8)) == rows
    small_groups = mxfp4._replace(scales_weights=False, group=16)
    assert launch.width_of(tokens, 4, 32, (mxfp4, small_groups)) <= 96  # else registers spill


def test_steps_of_few_tokens() -> None:
    """Inputs in an odd number of tiles are shared by two warpgroups, if all CTAs have items."""

    def config(tokens: int, inner: int) -> launch.DecodeConfig:
        args = _shapes(replace(CASES["gemma4_26b_t8"], tokens=tokens, inner=inner))
        return launch.decode_config(launch.sizes_of(args)[1])

    assert config(1, 704) == launch.DecodeConfig(64, 16)
    assert config(64, 704) == launch.DecodeConfig(64, 13, 2)
    assert config(64, 768) == launch.DecodeConfig(256, 6)


@pytest.mark.parametrize(("inner", "all_tokens"), [(704, False), (768, True)])
def test_tokens_are_sorted_if_an_item_is_narrow(inner: int, all_tokens: bool) -> None:
    args = _shapes(replace(CASES["gemma4_26b_t8"], tokens=64, inner=inner))
    assert launch.sizes_of(args)[0].all_tokens == all_tokens


def test_other_activations_are_refused_with_a_reason() -> None:
    (args,) = cases.build(BF16, seed=0).args
    refused = launch.supports(replace(args, activation=Activation(kind="gelu")))
    assert refused == "the activation is gelu, not one of silu, gelu_tanh"
