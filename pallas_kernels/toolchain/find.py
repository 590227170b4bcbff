"""The kernels in a trace, and how to compile each of them.

jax-triton compiles a kernel when a step with it is lowered, and caches it; Mosaic does so when XLA
compiles the step. Most of that time is spent in LLVM, which does not hold the GIL. So threads can
compile the kernels of steps that are traced but not lowered yet.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from pallas_kernels.toolchain.jax_internals import TRITON_PRIMITIVE
from pallas_kernels.toolchain.kernel_call import LoweredKernel, kernel_call_p
from pallas_kernels.toolchain.torch_hidden import torch_hidden


def kernels_in(traced: ClosedJaxpr) -> dict[Hashable, Callable[[], Any]]:
    """The kernels in a trace, in order: a key that determines the machine code, and a function that
    compiles it.

    A kernel has the same key in every trace. The key of a Mosaic kernel is its ``LoweredKernel``.
    """
    found: dict[Hashable, Callable[[], Any]] = {}
    for call in _calls(traced.jaxpr, set()):
        if call.primitive.name == TRITON_PRIMITIVE:
            found.setdefault(_key(call), partial(_compile, call))
        elif call.primitive is kernel_call_p:
            kernel: LoweredKernel = call.params["kernel"]
            found.setdefault(kernel, kernel.compile)
    return found


def _calls(jaxpr: Jaxpr, seen: set[Jaxpr]) -> Iterator[JaxprEqn]:
    if jaxpr in seen:  # for example the function of a layer, which is called for every layer
        return
    seen.add(jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _calls(inner, seen)


def _key(call: JaxprEqn) -> Hashable:
    relevant = ("fn", "metaparams", "backend_options")  # not the grid and run-time integers
    types = [x.dtype for x in (*_avals(call), *call.params["out_shapes"])]
    return *(call.params[name] for name in relevant), *types


def _avals(call: JaxprEqn) -> list[Any]:
    return [var.aval for var in call.invars]


def _compile(call: JaxprEqn) -> None:
    """Lower the call by itself, so that jax-triton compiles and caches its kernel."""
    avals = _avals(call)
    is_ref = [hasattr(aval, "inner_aval") for aval in avals]

    def alone(*arrays: jax.Array) -> Any:
        pairs = zip(arrays, is_ref, strict=True)
        passed = [jax.new_ref(array) if ref else array for array, ref in pairs]
        return call.primitive.bind(*passed, **call.params)

    traced = jax.jit(alone).trace(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    with torch_hidden():
        traced.lower()
