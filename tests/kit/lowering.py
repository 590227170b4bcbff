"""A kernel lowered for a GPU on a machine without one."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.harness.registry import Impl, Inputs, KernelOp, arrays_of


def lowered_in_place(op: KernelOp, impl: Impl, inputs: Inputs) -> str:
    """The StableHLO of an implementation for CUDA, in a step that donates the op's arrays."""
    arrays, structure = arrays_of(inputs.args)

    def step(*arrays: Any) -> Any:
        return impl.fn(*structure.unflatten(arrays), **inputs.static)

    traced = jax.jit(step, donate_argnums=op.donate).trace(*arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()
