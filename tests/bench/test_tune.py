"""The tuner with seconds from a formula: it keeps the faster choices and ignores failures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import astuple, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench import tune
from pallas_kernels.append_decode.cases import CASES
from pallas_kernels.append_decode.launch import TritonConfig
from pallas_kernels.paged_prefill.cases import CASES as PREFILL_CASES
from pallas_kernels.paged_prefill.launch import TritonConfig as PrefillConfig
from pallas_kernels.skinny_gemm.launch import GemmConfig
from pallas_kernels.skinny_gemm.ref import GemmArgs

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

STEP = next(case for case in CASES if case.name == "qwen3_4b_step_b8_ctx1056_page16")


def _seconds(op: Any, function: Callable[..., Any], arguments: Any, cost: Any) -> float:
    (choice,) = function.args  # type: ignore[attr-defined]
    if choice.num_stages == 7:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory\nand more lines")
    misses = abs(choice.splits - 16) + abs(choice.block - 32) + abs(choice.num_stages - 3)
    return 1e-5 * (10 + misses + abs(choice.num_warps - 8))


def test_each_value_ends_at_its_best(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune, "seconds_in_a_chain", _seconds)
    lengths = ((9,) * 8, (40,) * 8)
    cases = [replace(STEP, seq_lens=each, max_pages=2048) for each in lengths]
    found = tune.tune(tune.TUNABLE["append_decode"], cases)
    assert found == TritonConfig(splits=16, block=32, num_warps=8, num_stages=3)
    printed = capsys.readouterr().out
    assert "RESOURCE_EXHAUSTED: shared memory\n" in printed and "more lines" not in printed


def test_the_best_of_several_starts_is_improved(monkeypatch) -> None:
    wanted = PrefillConfig(128, 128, num_warps=4, num_stages=2)

    def seconds(op: Any, function: Callable[..., Any], arguments: Any, cost: Any) -> float:
        (choice,) = function.args  # type: ignore[attr-defined]
        return 1e-5 * (
            1 + sum(x != y for x, y in zip(astuple(choice), astuple(wanted), strict=True))
        )

    monkeypatch.setattr(tune, "seconds_in_a_chain", seconds)
    assert tune.tune(tune.TUNABLE["paged_prefill"], PREFILL_CASES[:1]) == wanted


def test_every_tunable_op_starts_from_its_rule() -> None:
    for name, tunable in tune.TUNABLE.items():
        case = next(case for case in tunable.op.cases if "ci" in case.tags)
        start, *_ = tunable.starts(case, tunable.op.build(case, 0).args)
        names = {field.name for field in fields(start)}
        assert names >= {value for value, _ in tunable.values}, name


def test_a_kernel_in_mosaic_is_lowered_once_for_a_chain() -> None:
    tunable = tune.TUNABLE["skinny_gemm"]
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 256), (256, 256)))

    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(2):
            x = tunable.launch_with(GemmConfig(64, 64, 2), GemmArgs(x=x, w=w))
        return x

    text = jax.jit(twice).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic") == 1


def test_a_choice_replaces_the_one_of_another_case_with_the_same_shapes() -> None:
    gemm = tune.TUNABLE["skinny_gemm"]
    before = {"qwen3_4b_down_t8": {"stages": 3}, "qwen3_4b_down_t16": {"stages": 4}}
    assert tune.merged_choices(gemm, before, {"qwen3_4b_down_t1": {"stages": 5}}) == {
        "qwen3_4b_down_t16": {"stages": 4},
        "qwen3_4b_down_t1": {"stages": 5},
    }


def test_needs_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", "--op", "append_decode"])
    with pytest.raises(SystemExit, match="needs a GPU, not"):
        tune.main()
