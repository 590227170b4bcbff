"""The sweep: every implementation of every op against the op's definition, on poisoned cases."""

from __future__ import annotations

import pytest

from pallas_kernels.harness.registry import Case, KernelOp, all_ops
from pallas_kernels.harness.testing import mismatch, runnable
from pallas_kernels.lib.device import Device, compiling_for

SWEEP = [
    pytest.param(op, case, id=f"{op.name}-{case.name}")
    for op in all_ops()
    for case in op.cases
    if "ci" in case.tags
]


@pytest.mark.parametrize(("op", "case"), SWEEP)
def test_implementations_match_the_definition(op: KernelOp, case: Case) -> None:
    inputs = op.build(case, seed=0)
    refusals = {impl.name: runnable(impl, inputs) for impl in op.impls}
    able = [impl for impl in op.impls if refusals[impl.name] is None]
    assert able, f"every implementation of {op.name} skips {case.name}: {refusals}"
    for impl in able:
        assert (difference := mismatch(op, impl, case, inputs)) is None, difference


@pytest.mark.parametrize("op", all_ops(), ids=lambda op: op.name)
def test_a_sweep_on_an_h200_reaches_every_implementation(op: KernelOp) -> None:
    """The sweep of ``bench.kernels --check``."""
    untried = {impl.name for impl in op.impls if impl.platforms != ("cpu",)}
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        for case in (case for case in op.cases if {"ci", "full"} & {*case.tags}):
            inputs = op.build(case, seed=0)
            untried -= {impl.name for impl in op.impls if runnable(impl, inputs) is None}
    assert not untried
