"""Values in registers that are loaded from or stored to elements of an array, each to its own.

Pallas has no such loads and stores. JAX's interpreter cannot run what is here: tests replace both
functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector

type Ref = Any


def load_at(ref: Ref, indices: jax.Array) -> jax.Array:  # float32[N], int32[C] -> float32[C]
    """The elements of an array in global memory; the layout is that of a wgmma's columns."""
    layout = plgpu.Layout.WGMMA.reduce(0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct(indices.shape, jnp.float32, layout=layout),
    )
    def load(_: Any, source: Any, where: Any) -> Any:
        flat = _flat(source)
        registers = np.empty(where.registers.shape, dtype=object)
        for place, register in np.ndenumerate(where.registers):
            found = [memref.load(flat, [index]) for index in _indices(register)]
            kind = ir.VectorType.get((len(found),), ir.F32Type.get())
            registers[place] = vector.from_elements(kind, found)
        return mgpu.FragmentedArray(_registers=registers, _layout=where.layout, _is_signed=None)

    run: Any = load  # without its first argument, the context
    return run(ref, indices)


def store_at(ref: Ref, offsets: jax.Array, values: jax.Array) -> None:  # int32[64, C], [64, C]
    """Store each value at its offset in an array in global memory; no value with a negative one.

    Both arrays have the layout of a wgmma's result.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WGMMA))
    def store(_: Any, target: Any, where: Any, what: Any) -> None:
        flat, zero = _flat(target), mgpu.c(0, ir.IndexType.get())
        for places, register in zip(where.registers.flat, what.registers.flat, strict=True):
            for i, index in enumerate(_indices(places)):
                value = vector.extract(register, dynamic_position=[], static_position=[i])
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.sge, index, zero)):
                    memref.store(value, flat, [index])

    run: Any = store
    run(ref, offsets, values)


def _flat(ref: Any) -> Any:
    return mgpu.memref_fold(ref, 0, len(ref.type.shape))


def _indices(register: Any) -> Iterator[Any]:
    """The elements of a register of int32 as indices."""
    for i in range(register.type.shape[0]):
        element = vector.extract(register, dynamic_position=[], static_position=[i])
        yield arith.index_cast(ir.IndexType.get(), element)
