"""The sweep: every implementation of every op against the op's definition, on poisoned cases."""

from __future__ import annotations

import pytest

from pallas_kernels.registry import Case, KernelOp, all_ops
from pallas_kernels.testing import mismatch, runnable

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
