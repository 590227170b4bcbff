"""Kernels compiled ahead of the steps that they are in.

jax-triton compiles a kernel when a step around it is lowered, and remembers it; Mosaic does so when
XLA compiles the step. Most of that time is LLVM's, outside of Python's lock. So whoever has many
steps to lower may trace them first and let other threads compile the kernels that are in them.
Owns: ``kernels_in``. Must not know: steps, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, subjaxprs

from pallas_kernels.lowered import LoweredKernel
from pallas_kernels.torch_hidden import torch_hidden

TRITON_CALL = "triton_kernel_call"  # jax-triton's primitive


def kernels_in(traced: ClosedJaxpr) -> dict[Hashable, Callable[[], Any]]:
    """Every kernel in what was traced: how to compile it, by what decides its machine code.

    A kernel that two traces have in common is the same key in both.
    """
    found: dict[Hashable, Callable[[], Any]] = {}
    for call in _calls(traced.jaxpr, set()):
        lowered = call.params.get("exported")
        if call.primitive.name == TRITON_CALL:
            found.setdefault(_key(call), partial(_compile, call))
        elif isinstance(lowered, LoweredKernel):
            found.setdefault(lowered, lowered.compile)
    return found


def _calls(jaxpr: Jaxpr, seen: set[Jaxpr]) -> Iterator[JaxprEqn]:
    if jaxpr in seen:  # a layer's function, say, which is called for every layer
        return
    seen.add(jaxpr)
    yield from jaxpr.eqns
    for inner in subjaxprs(jaxpr):
        yield from _calls(inner, seen)


def _key(call: JaxprEqn) -> Hashable:
    decisive = ("fn", "metaparams", "backend_options")  # grid and run-time integers are not
    types = [x.dtype for x in (*_avals(call), *call.params["out_shapes"])]
    return *(call.params[name] for name in decisive), *types


def _avals(call: JaxprEqn) -> list[Any]:
    return [var.aval for var in call.invars]


def _compile(call: JaxprEqn) -> None:
    """Lower the call alone, so that jax-triton knows its kernel."""
    avals = _avals(call)
    is_ref = [hasattr(aval, "inner_aval") for aval in avals]

    def alone(*arrays: jax.Array) -> Any:
        pairs = zip(arrays, is_ref, strict=True)
        handed = [jax.new_ref(array) if ref else array for array, ref in pairs]
        return call.primitive.bind(*handed, **call.params)

    traced = jax.jit(alone).trace(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    with torch_hidden():
        traced.lower()
