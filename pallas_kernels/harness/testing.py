"""Comparison of an implementation with the op's definition on a poisoned case.

Owns: ``mismatch`` and ``runnable``; the sweep test and the bench are loops over these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import (
    Case,
    Impl,
    Inputs,
    KernelOp,
    arrays_of,
    current_platform,
    with_refs,
)
from pallas_kernels.lib.shapes import ScaledHeads


def runnable(impl: Impl, inputs: Inputs) -> str | None:
    """Why the implementation cannot run these inputs on the current platform, or None."""
    return impl.refuses(current_platform(), inputs.args, inputs.static)


def _is_finite(x: Any) -> bool:
    if isinstance(x, ScaledHeads):
        return x.is_finite()
    return bool(np.isfinite(np.asarray(x, np.float64)).all())


def _errors(result: Any, reference: Any) -> np.ndarray:
    """Differences by which a result is judged."""
    if isinstance(reference, ScaledHeads):
        return result.errors(reference)
    result64, reference64 = np.asarray(result, np.float64), np.asarray(reference, np.float64)
    return np.abs(result64 - reference64) / (1.0 + np.abs(reference64))


def mismatch(op: KernelOp, impl: Impl, case: Case, inputs: Inputs) -> str | None:
    """How the implementation's jitted result differs from its definition's, or None.

    NaN in the result counts as a difference: the inputs are NaN wherever the op must not read.
    """
    expected = op.observable((impl.ref or op.ref)(*inputs.args, **inputs.static))

    @jax.jit
    def run(args: tuple[Any, ...]) -> tuple[Any, list[jax.Array]]:
        arrays, structure = arrays_of(args)
        passed = with_refs(op, dict(enumerate(arrays)))
        outputs = impl.fn(*structure.unflatten(passed.values()), **inputs.static)
        return outputs, [passed[i][...] for i in op.refs if passed[i] is not None]

    outputs, after = run(jax.tree.map(jnp.asarray, inputs.args))
    actual = op.observable(outputs)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for index, (result, reference) in enumerate(pairs):
        where = f"{op.name}/{impl.name}/{case.name} output {index}"
        if result.shape != reference.shape or result.dtype != reference.dtype:
            types = f"{result.dtype}{result.shape} instead of {reference.dtype}{reference.shape}"
            return f"{where}: {types}"
        if not _is_finite(reference):
            return f"{where}: the reference itself is not finite"
        error = _errors(result, reference)
        bound = op.tolerance[str(reference.dtype)]
        worst = float(error.max(initial=0.0))
        if not worst <= bound:  # also true for NaN
            return f"{where}: off by {worst:.3g}, at most {bound:.3g} is accepted"
    arrays, _ = arrays_of(inputs.args)
    before = [arrays[i] for i in op.refs if arrays[i] is not None]
    if not all(np.array_equal(*pair) for pair in zip(before, after, strict=True)):
        return f"{op.name}/{impl.name}/{case.name} changes an argument that it takes as a Ref"
    return None
