"""The Triton kernels that sort tokens by expert, without a GPU: right in the interpreter, and
machine code for Hopper.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

from kit.experts_sort_sweep import CASES
from kit.interpreted_process import interpreted
from kit.triton_shims import Recorder, compile_call, in_place_of_triton_call
from pallas_kernels.experts import triton


@pytest.fixture(scope="module")
def differences() -> dict[str, list[str]]:
    return interpreted("kit.experts_sort_sweep")


@pytest.mark.parametrize("name", CASES)
def test_the_interpreter_agrees_with_the_definition(
    name: str, differences: dict[str, list[str]]
) -> None:
    assert differences[name] == []


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "width"),
    [
        pytest.param(1, 8, 128, 8, id="one_token"),
        pytest.param(64, 8, 128, 16, id="64_tokens"),
        pytest.param(8192, 8, 128, 128, id="a_prompt"),
        pytest.param(8192, 8, 384, 128, id="many_experts", marks=pytest.mark.nightly),
    ],
)
def test_compiles_for_hopper_without_spills(
    tokens: int, chosen: int, experts: int, width: int
) -> None:
    x = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16)
    choices = jax.ShapeDtypeStruct((tokens, chosen), jnp.int32)
    weights = jax.ShapeDtypeStruct((tokens, chosen), jnp.float32)

    def sorted_and_back(x: jax.Array, choices: jax.Array, weights: jax.Array) -> jax.Array:
        tiles = triton.tiles_of(choices, experts, width)
        return triton.gather(triton.spread(x, tiles.place, tiles.pairs.size), tiles.place, weights)

    recorder = Recorder()
    with in_place_of_triton_call(recorder):
        jax.eval_shape(sorted_and_back, x, choices, weights)
    for call in recorder.calls:
        code = compile_call(call)
        assert code.spilled_bytes == 0, f"{call} spills: {code}"
