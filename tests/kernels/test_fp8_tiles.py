"""bench.fp8_tiles without a GPU: which tiles it times, and that each computes the GEMM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench import fp8_tiles
from pallas_kernels.harness.registry import KernelOp
from pallas_kernels.quantised_gemm.cases import CASES
from pallas_kernels.quantised_gemm.fp8 import tokens

BY_NAME = {case.name: case for case in CASES}
ALL_TILES = {(2, 2), (3, 1), (2, 1)}  # warpgroups, accumulators


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("fp8_blocks_t264_bf16", len(ALL_TILES), marks=pytest.mark.nightly),
        ("fp8_blocks_t64_bf16", 1),
    ],
)
def test_each_config_computes_the_gemm(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[jax.Array] = []

    def once(op: KernelOp, run: Callable[..., Any], args: Sequence[Any], cost: Any) -> float:
        results.append(run(*args))
        return 1e-6

    monkeypatch.setattr(fp8_tiles, "seconds_in_a_chain", once)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        rows = list(fp8_tiles.time_case(BY_NAME[name]))
    assert [row["us"] for row in rows] == [1.0] * count
    if count > 1:
        assert {(row["config"]["warpgroups"], row["config"]["accs"]) for row in rows} == ALL_TILES
    (call,) = fp8_tiles.OP.build(BY_NAME[name], 0).args
    expected = np.asarray(tokens.quantised_gemm(call))
    for result in results:
        actual, wide = np.asarray(result, np.float32), expected.astype(np.float32)
        np.testing.assert_allclose(actual, wide, rtol=0.01, atol=0.01)


def test_the_cases_exist() -> None:
    for gemm in fp8_tiles.GEMMS:
        for form in fp8_tiles.FORMS:
            assert all(f"qwen3_4b_{gemm}_{form}_t{n}" in BY_NAME for n in fp8_tiles.TOKENS)
