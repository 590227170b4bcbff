"""A call of linked kernels by itself, to be compiled ahead of the step that it is in.

Owns: ``LinkedCall``. Must not know: how kernels are linked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.extend.mlir import serialize_portable_artifact
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import dtype_to_ir_type, ir

from pallas_kernels.custom_calls import MODULE, attribute_of, in_place_of
from pallas_kernels.device import current_device
from pallas_kernels.lowered import Run, run_here
from pallas_kernels.machine_code import Alone, take_over

DTYPES = ("bfloat16", "float16", "float32", "int32", "float8_e4m3fn")  # of what kernels take


@dataclass(frozen=True)
class LinkedCall:
    """By all that decides what is compiled."""

    kernel: bytes  # Mosaic's module
    alone: Alone

    @classmethod
    def of(cls, call: Any) -> Self:  # of an ir.Operation
        """A call in a module, within the module's context."""
        inputs, outputs = ([x.type for x in values] for values in (call.operands, call.results))
        module = ir.Module.parse("module @linked {}")
        with ir.InsertionPoint(module.body):
            kind = ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs))
            named = {"sym_name": ir.StringAttr.get("main"), "function_type": kind}
            function = ir.Operation.create("func.func", attributes=named, regions=1)
        block = ir.Block.create_at_start(function.regions[0], inputs)
        with ir.InsertionPoint(block):
            copy = call.clone()
            for i, argument in enumerate(block.arguments):
                copy.operands[i] = argument
            ir.Operation.create("func.return", operands=list(copy.results))
        artifact = serialize_portable_artifact(module, stablehlo.get_current_version())
        in_place = tuple(sorted(in_place_of(call).values()))
        rest = (_shapes(inputs), _shapes(outputs), current_device(), in_place)
        return cls(attribute_of(call, MODULE), Alone("linked kernels", artifact, *rest))

    def compile(self, run: Run = run_here) -> None:
        """Have the machine code of its kernels in this process, as ``LoweredKernel.compile``."""
        take_over(run(self.alone.compiled))


def _shapes(types: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    by_type = {str(dtype_to_ir_type(jnp.dtype(name))): name for name in DTYPES}
    tensors = [ir.RankedTensorType(kind) for kind in types]
    return tuple(
        jax.ShapeDtypeStruct(tuple(x.shape), by_type[str(x.element_type)]) for x in tensors
    )
