"""bench.fp8_pages without a GPU: its calls are those of the ops, and its launches exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench import fp8_pages
from pallas_kernels.harness.registry import Cost, KernelOp


def test_each_launch_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed: list[tuple[str, str, int]] = []

    def once(op: KernelOp, run: Callable[..., Any], args: tuple[Any, ...], cost: Cost) -> float:
        assert callable(run)
        timed.append((op.name, str(args[0].k_pages.dtype), cost.bytes))
        return 1e-6

    monkeypatch.setattr(fp8_pages, "seconds_in_a_chain", once)
    for op in fp8_pages.APIS:
        fp8_pages.main(["--op", op, "--contexts", "40"])
    lines = capsys.readouterr().out.splitlines()
    names = [name for names in fp8_pages.LAUNCHES.values() for name in names.split(",")]
    assert sorted(line.split()[2] for line in lines) == sorted(names)
    assert {dtype for _, dtype, _ in timed} == {"uint8", "bfloat16"}
    keys = 2 * 8 * 40 * 8
    assert ("append_decode", "uint8", keys * 132) in timed
    assert ("append_decode", "bfloat16", keys * 256) in timed


@pytest.mark.parametrize("op", fp8_pages.APIS)
def test_a_call_is_one_of_the_op(op: str) -> None:
    args = fp8_pages.arguments(op, 2, 20, is_scaled=True)
    result = fp8_pages.function_of(op, "bf16")(args)
    out = result if op == "paged_prefill" else result[0]
    assert bool((abs(out) > 0).any())
