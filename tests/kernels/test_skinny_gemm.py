"""skinny_gemm's arguments are checked; its launches fill the chip and fit it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.skinny_gemm import launch
from pallas_kernels.skinny_gemm.api import skinny_gemm
from pallas_kernels.skinny_gemm.cases import CASES
from pallas_kernels.skinny_gemm.launch import Launch
from pallas_kernels.skinny_gemm.sizes import ARRIVALS, Sizes

DOWN = Sizes(16, 9728, 2560, norm=False, swiglu=False, dtype="bfloat16")
GATE_UP = Sizes(16, 2560, 9728, norm=True, swiglu=True, dtype="bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"w": (32, 8)}, "do not fit weights", id="inner"),
        pytest.param({"w": (16, 9)}, "9 columns are not a gate and an up", id="odd"),
        pytest.param({"norm": 8}, "norm .* does not fit tokens", id="norm"),
        pytest.param({"residual": (3, 8)}, r"does not fit results \(3, 4\)", id="residual"),
        pytest.param({"arrivals": 7}, f"are fewer than {ARRIVALS}", id="arrivals"),
    ],
)
def test_arguments_that_do_not_fit(change, message) -> None:
    sizes = {"x": (3, 16), "w": (16, 8), "norm": 16, "residual": (3, 4), "arrivals": ARRIVALS}
    arrays: dict[str, Any] = {
        name: jnp.zeros(change.get(name, size)) for name, size in sizes.items()
    }
    arrays["arrivals"] = jax.new_ref(arrays["arrivals"].astype(jnp.int32))
    with pytest.raises(ValueError, match=message):
        skinny_gemm(**arrays, eps=1e-6, swiglu=True)


@pytest.mark.parametrize(
    ("parts", "change"), [(0, {}), (2, {"swiglu": True}), (2, {"residual": jnp.zeros((3, 8))})]
)
def test_parts_that_cannot_be_added_up_later(parts: int, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"no {parts} parts"):
        skinny_gemm(jnp.zeros((3, 16)), jnp.zeros((16, 8)), parts=parts, **change)


@pytest.mark.parametrize(
    ("x", "w", "dtype", "norm", "reason"),
    [
        pytest.param((16, 64), (64, 64), "bfloat16", True, None, id="fits"),
        pytest.param((257, 64), (64, 64), "bfloat16", True, "257 tokens are not", id="tokens"),
        pytest.param((16, 60), (60, 64), "bfloat16", False, "multiple of 8", id="inner"),
        pytest.param((16, 64), (64, 50), "bfloat16", False, "multiple of 8", id="outer"),
        pytest.param((16, 1 << 16), (1 << 16, 1 << 15), "bfloat16", False, "32 bits", id="size"),
        pytest.param((16, 64), (64, 64), "float16", True, "may overflow", id="float16_norm"),
        pytest.param((16, 64), (64, 64), "float16", False, None, id="float16"),
    ],
)
def test_calls_of_the_kernel(x, w, dtype, norm, reason) -> None:
    tokens, weights, norms = (jax.ShapeDtypeStruct(y, jnp.dtype(dtype)) for y in (x, w, x[1:]))
    given: list[Any] = [tokens, weights, norms if norm else None, None, None]
    found = launch.supports(*given, eps=0.0, swiglu=False, parts=1)
    assert found is reason if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("sizes", "block_t", "block_n", "splits"),
    [
        pytest.param(DOWN, 16, 64, 3, id="few_columns_are_split"),
        pytest.param(GATE_UP, 16, 32, 1, id="many_columns_are_not"),
        pytest.param(DOWN._replace(tokens=64), 64, 128, 6, id="tokens"),
        pytest.param(DOWN._replace(tokens=200), 128, 128, 3, id="two_tiles_of_tokens"),
        pytest.param(DOWN._replace(inner=64), 16, 64, 1, id="one_block"),
    ],
)
def test_rule(sizes: Sizes, block_t: int, block_n: int, splits: int) -> None:
    choice = launch.by_rule(sizes)
    assert (choice.block_t, choice.block_n, choice.splits) == (block_t, block_n, splits)


def test_tiles_that_are_split_are_few_enough_to_count() -> None:
    for case in CASES:
        choice = launch.by_rule(case.sizes)
        rows, columns = choice.tiles(case.sizes)
        assert choice.splits == 1 or rows * columns <= ARRIVALS


def test_a_tuned_choice_serves_all_numbers_of_tokens_of_its_tile(monkeypatch) -> None:
    choice = {"block_t": 16, "block_n": 32, "block_k": 64, "splits": 2}
    monkeypatch.setattr(launch.tuned, "read_choices", lambda file: {"qwen3_4b_down_t8": choice})
    assert launch.choose(DOWN._replace(tokens=3)) == Launch(**choice)
    assert launch.choose(DOWN._replace(tokens=17)) == launch.by_rule(DOWN._replace(tokens=32))
