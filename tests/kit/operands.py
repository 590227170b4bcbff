"""``misaligned``: operands of kernels whose address in another array is not a multiple enough.

XLA on a GPU passes a contiguous section of an array to a kernel as an address within it. Kernels
are compiled for addresses that are multiples of 16 bytes (Triton) or 256 (Mosaic).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import jax.numpy as jnp

# the bytes by the primitive that calls a kernel
ALIGNED = {"kernel_call": 256, "triton_kernel_call": 16}
SAME = ("reshape", "squeeze", "expand_dims", "bitcast_convert_type")

type Producer = tuple[Any, int]  # an equation, and the index of its output


def misaligned(jaxpr: Any) -> list[str]:
    """A line for each such operand in a jaxpr and those within it."""
    return [*_misaligned(jaxpr, {})]


def _misaligned(jaxpr: Any, outer: Mapping[Any, Producer]) -> Iterator[str]:
    made: dict[Any, Producer] = dict(outer)
    for equation in jaxpr.eqns:
        needed = ALIGNED.get(equation.primitive.name)
        for i, operand in enumerate(equation.invars):
            if needed and _is_float(operand) and (at := _offset(operand, made)) % needed:
                yield f"operand {i} {operand.aval.str_short()} is at {at} bytes: {equation.params}"
        for inner in _inner(equation):
            given = [made.get(v) if _is_variable(v) else None for v in equation.invars]
            names = inner.invars[-len(given) :] if given else []
            pairs = zip(names, given, strict=True) if len(names) == len(given) else ()
            yield from _misaligned(inner, {v: one for v, one in pairs if one is not None})
        made |= {v: (equation, i) for i, v in enumerate(equation.outvars)}


def _is_float(value: Any) -> bool:
    """True of activations. Integers are read by XLA's code around a kernel, or are sections of a
    batch, which ``BatchLayout`` aligns.
    """
    return jnp.issubdtype(value.aval.dtype, jnp.floating)


def _is_variable(value: Any) -> bool:
    return not hasattr(value, "val")


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            found = getattr(one, "jaxpr", one)
            if hasattr(found, "eqns"):
                yield found


def _offset(value: Any, made: Mapping[Any, Producer]) -> int:
    """The bytes of a contiguous section's begin in its array; 0 of other values."""
    total = 0
    while _is_variable(value) and value in made:
        equation, index = made[value]
        name, (array, *_) = equation.primitive.name, equation.invars or (None,)
        if name == "slice":
            starts = equation.params["start_indices"]
        elif name == "split":
            axis = equation.params["axis"]
            starts = [0] * array.aval.ndim
            starts[axis] = sum(equation.params["sizes"][:index])
        elif name in SAME:
            value = array
            continue
        else:
            break
        shape, own = array.aval.shape, equation.outvars[index].aval.shape
        cut = [i for i in range(len(shape)) if own[i] != shape[i]]
        if cut and prod(own[: cut[-1]]) != 1:
            break  # not contiguous: XLA copies it
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        begin = sum(a * b for a, b in zip(starts, strides, strict=True))
        total += begin * array.aval.dtype.itemsize
        value = array
    return total
