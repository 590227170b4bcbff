"""experts on Hopper without a GPU: right in JAX's interpreter, and lowered for Hopper.

The Triton kernels that sort tokens are replaced by their definitions; ``test_experts_sort`` tests
them. What the interpreter cannot do with registers is replaced (``kit.tiled_shims``).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kit.tiled_shims import replace_registers
from pallas_kernels.experts import cases, decode, hopper, launch, prompt, sort, tiles
from pallas_kernels.experts.api import OP
from pallas_kernels.experts.cases import ExpertsCase
from pallas_kernels.registry import Impl
from pallas_kernels.testing import mismatch

HOPPER = next(impl for impl in OP.impls if impl.name == "hopper")
CASES = {case.name: case for case in cases.CASES}
BF16 = replace(CASES["seven_experts_bf16"], count=5)
TILES = replace(CASES["int4_tiles"], width=64, inner=64, count=3, chosen=2, tokens=2)
MANY = launch.FEW_TOKENS + 1
INTERPRETED = {
    "one_token": replace(BF16, tokens=1),
    "outside": replace(BF16, tokens=33, load="holes"),
    "biases": replace(BF16, tokens=9, biases=True, activation=cases.CLAMPED),
    "one_expert_has_all": replace(BF16, tokens=24, load="few", count=3),
    "several_steps": replace(BF16, tokens=8, width=320, inner=192),
    "prompt": replace(BF16, tokens=MANY, load="holes", split=False),
    "prompt_few_experts": replace(BF16, tokens=150, count=3, load="few", inner=128),
    "prompt_biases": replace(BF16, tokens=MANY, biases=True, activation=cases.CLAMPED),
    "int4": TILES,
    "int4_sorted": replace(TILES, tokens=17, load="holes", inner=128),
    "int4_zeros": replace(TILES, form="int4_zeros", group=64, width=128),
    "int8": replace(TILES, form="int8"),
    "fp4": replace(TILES, form="fp4", biases=True, activation=cases.CLAMPED),
    "int4_prompt": replace(TILES, tokens=MANY, load="holes"),
    "fp4_prompt": replace(TILES, tokens=MANY, form="fp4", biases=True, activation=cases.CLAMPED),
}
LOWERED = ("qwen3_30b_t1", "qwen3_30b_t1024", "qwen3_30b_int4_t64", "gpt_oss_20b_fp4_t8192")


def _spread(x: jax.Array, place: jax.Array, num_rows: int) -> jax.Array:
    tokens = jnp.repeat(x, place.shape[1], axis=0)
    rows = jnp.full((num_rows, x.shape[1]), jnp.nan, x.dtype)
    return rows.at[place.reshape(-1)].set(tokens, mode="drop")


def _gather(rows: jax.Array, place: jax.Array, weights: jax.Array) -> jax.Array:
    found = rows.astype(jnp.float32).at[place].get(mode="fill", fill_value=0.0)
    return jnp.sum(found * weights[..., None], axis=1).astype(rows.dtype)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort, "tiles_of", tiles.tiles_of)
    monkeypatch.setattr(sort, "spread", _spread)
    monkeypatch.setattr(sort, "gather", _gather)
    # The interpreter would start a thread for each warp.
    monkeypatch.setattr(plgpu, "warp_map", lambda run: run(jnp.int32(0)))
    few_sms = SimpleNamespace(num_sms=3)  # so that CTAs compute several items
    for module in (decode, prompt):
        monkeypatch.setattr(module, "current_device", lambda: few_sms)
    replace_registers(monkeypatch)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "not_hopper", lambda: None)


@pytest.mark.parametrize("case", INTERPRETED.values(), ids=INTERPRETED)
@pytest.mark.usefixtures("replaced", "on_hopper")
def test_the_interpreter_agrees_with_the_definition(case: ExpertsCase) -> None:
    inputs = OP.build(case, 0)
    assert HOPPER.refuses("gpu", inputs.args, inputs.static) is None
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        problem = mismatch(OP, Impl("hopper", hopper.experts), case, inputs)
    assert problem is None, problem
