"""skinny_gemm's arguments are checked; its launches follow measurements and fit the chip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.skinny_gemm import launch
from pallas_kernels.skinny_gemm.api import skinny_gemm
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase, Sizes
from pallas_kernels.skinny_gemm.launch import Launch

QKV = Sizes(8, 2560, 6144, swiglu=False, split=False, dtype="bfloat16")
GATE_UP = QKV._replace(outer=9728, swiglu=True)
DOWN = QKV._replace(inner=9728, outer=2560, split=True)
LAUNCHED = [case for case in CASES if "gpu" in case.tags]


@pytest.mark.parametrize(
    ("w", "static", "message"),
    [
        pytest.param((32, 8), {}, "do not fit weights", id="inner"),
        pytest.param((16, 9), {"swiglu": True}, "9 columns are not a gate and an up", id="odd"),
        pytest.param((16, 8), {"swiglu": True, "split": True}, "is not split", id="split"),
    ],
)
def test_arguments_that_do_not_fit(w: tuple[int, int], static: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skinny_gemm(jnp.zeros((3, 16)), jnp.zeros(w), **static)


@pytest.mark.parametrize(
    ("sizes", "choice"),
    [
        pytest.param(QKV, Launch(64, 128, 6), id="qkv"),
        pytest.param(QKV._replace(tokens=64), Launch(64, 128, 7), id="qkv_t64"),
        pytest.param(GATE_UP, Launch(64, 128, 3), id="gate_up"),
        pytest.param(GATE_UP._replace(tokens=64), Launch(64, 64, 4), id="gate_up_t64"),
        pytest.param(DOWN, Launch(64, 128, 6, parts=3), id="down"),
        pytest.param(DOWN._replace(inner=4096, tokens=64), Launch(64, 128, 7, 1, 3), id="o_t64"),
        pytest.param(DOWN._replace(split=False), Launch(64, 128, 6), id="not_split"),
        pytest.param(DOWN._replace(inner=64), Launch(64, 64, 12), id="one_step"),
    ],
)
def test_rule(sizes: Sizes, choice: Launch) -> None:
    assert launch.by_rule(sizes) == choice


def _tuned() -> list[tuple[GemmCase, Launch]]:
    cases = {case.name: case for case in CASES}
    files = (Path(launch.__file__).parent / "tuned").glob("*.json")
    named = [pair for file in files for pair in json.loads(file.read_text()).items()]
    return [(cases[name], Launch(**choice)) for name, choice in named]


@pytest.mark.parametrize(
    ("case", "choice"),
    [
        *(pytest.param(x, launch.by_rule(x.sizes), id=f"rule-{x.name}") for x in LAUNCHED),
        *(pytest.param(x, choice, id=f"tuned-{x.name}") for x, choice in _tuned()),
    ],
)
def test_choices_fit_the_chip(case: GemmCase, choice: Launch) -> None:
    assert choice.cuts_up(case.sizes)
    columns = choice.block_n * (1 + case.swiglu) + max(case.tokens, 8)
    assert choice.stages * choice.block_k * columns * 2 <= 224 << 10


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param(Launch(64, 128, 1), id="one_stage_waits_for_itself"),
        pytest.param(Launch(64, 96, 3), id="rest_of_inner"),
        pytest.param(Launch(512, 128, 3), id="rest_of_columns"),
        pytest.param(Launch(64, 128, 3, warpgroups=2), id="half_of_8_tokens"),
        pytest.param(Launch(64, 128, 3, parts=2), id="parts_not_asked_for"),
    ],
)
def test_choices_that_do_not_cut_up(choice: Launch) -> None:
    assert not choice.cuts_up(QKV._replace(outer=6144 + 64))


def test_a_tuned_choice_serves_all_tokens_that_are_padded_alike(monkeypatch) -> None:
    choice = {"block_n": 64, "block_k": 64, "stages": 4, "parts": 2}
    monkeypatch.setattr(launch.tuned, "read_choices", lambda file: {"qwen3_4b_down_t8": choice})
    assert launch.choose(DOWN._replace(tokens=3)) == Launch(**choice)
    assert launch.choose(DOWN._replace(tokens=16)) == launch.by_rule(DOWN._replace(tokens=16))
