"""skinny_gemm: errors for bad arguments; configurations are as measured and fit an SM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.skinny_gemm import launch
from pallas_kernels.skinny_gemm.api import GemmArgs, skinny_gemm
from pallas_kernels.skinny_gemm.cases import CASES, GemmCase, GemmSizes
from pallas_kernels.skinny_gemm.launch import GemmConfig

QKV = GemmSizes(8, 2560, 6144, swiglu=False, split=False, dtype="bfloat16")
GATE_UP = QKV._replace(outer=9728, swiglu=True)
DOWN = QKV._replace(inner=9728, outer=2560, split=True)
ON_GPU = [case for case in CASES if "gpu" in case.tags]


@pytest.mark.parametrize(
    ("w", "static", "message"),
    [
        pytest.param((32, 8), {}, "do not fit weights", id="inner"),
        pytest.param((16, 9), {"swiglu": True}, "9 columns are not a gate and an up", id="odd"),
        pytest.param((16, 8), {"swiglu": True, "split": True}, "cannot be split", id="split"),
    ],
)
def test_arguments_that_do_not_fit(w: tuple[int, int], static: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        skinny_gemm(GemmArgs(x=jnp.zeros((3, 16)), w=jnp.zeros(w), **static))


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        pytest.param(QKV, GemmConfig(64, 128, 6), id="qkv"),
        pytest.param(QKV._replace(tokens=64), GemmConfig(64, 128, 7), id="qkv_t64"),
        pytest.param(GATE_UP, GemmConfig(64, 128, 3), id="gate_up"),
        pytest.param(GATE_UP._replace(tokens=64), GemmConfig(64, 64, 4), id="gate_up_t64"),
        pytest.param(DOWN, GemmConfig(64, 128, 6, split_k=3), id="down"),
        pytest.param(
            DOWN._replace(inner=4096, tokens=64), GemmConfig(64, 128, 7, 1, 3), id="o_t64"
        ),
        pytest.param(DOWN._replace(split=False), GemmConfig(64, 128, 6), id="not_split"),
        pytest.param(DOWN._replace(inner=64), GemmConfig(64, 64, 12), id="one_step"),
    ],
)
def test_heuristic(sizes: GemmSizes, config: GemmConfig) -> None:
    assert launch.heuristic_config(sizes) == config


def _tuned() -> list[tuple[GemmCase, GemmConfig]]:
    cases = {case.name: case for case in CASES}
    files = (Path(launch.__file__).parent / "tuned").glob("*.json")
    named = [pair for file in files for pair in json.loads(file.read_text()).items()]
    return [(cases[name], GemmConfig(**config)) for name, config in named]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        *(pytest.param(x, launch.heuristic_config(x.sizes), id=f"rule-{x.name}") for x in ON_GPU),
        *(pytest.param(x, config, id=f"tuned-{x.name}") for x, config in _tuned()),
    ],
)
def test_configs_fit_an_sm(case: GemmCase, config: GemmConfig) -> None:
    assert config.fits(case.sizes)
    columns = config.block_n * (1 + case.swiglu) + max(case.tokens, 8)
    assert config.stages * config.block_k * columns * 2 <= 224 << 10


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GemmConfig(64, 128, 1), id="one_stage_would_deadlock"),
        pytest.param(GemmConfig(64, 96, 3), id="rest_of_inner"),
        pytest.param(GemmConfig(512, 128, 3), id="rest_of_columns"),
        pytest.param(GemmConfig(64, 128, 3, warpgroups=2), id="half_of_8_tokens"),
        pytest.param(GemmConfig(64, 128, 3, split_k=2), id="split_k_without_split"),
    ],
)
def test_configs_that_do_not_fit(config: GemmConfig) -> None:
    assert not config.fits(QKV._replace(outer=6144 + 64))


def test_a_tuned_choice_is_used_for_all_tokens_that_are_padded_alike(monkeypatch) -> None:
    config = {"block_n": 64, "block_k": 64, "stages": 4, "split_k": 2}
    monkeypatch.setattr(launch.tuned, "read_choices", lambda file: {"qwen3_4b_down_t8": config})
    assert launch.choose_config(DOWN._replace(tokens=3)) == GemmConfig(**config)
    assert launch.choose_config(DOWN._replace(tokens=16)) == launch.heuristic_config(
        DOWN._replace(tokens=16)
    )
