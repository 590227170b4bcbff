"""experts by the native library, with weights in float32 or quantised.

Rows are sorted by expert; only the weights of experts that a token chose are read. The arithmetic
of quantised weights is that of ``quantised_gemm.native``. A token's result depends neither on the
other tokens nor on the number of threads.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts.ref import ExpertsArgs
from pallas_kernels.experts.stack import PLAIN, arrays_of, kind_of, size_of
from pallas_kernels.lib.quantised import Quantised
from pallas_kernels.native.library import EXPERTS, call, missing
from pallas_kernels.quantised_gemm.native import BLOCK, LANES, PADDING, misfit_of, record_bytes
from pallas_kernels.quantised_gemm.native import KINDS as QUANTISED_KINDS

KINDS = MappingProxyType({**QUANTISED_KINDS, PLAIN: 3})  # as in kernel.h
GATES = MappingProxyType({"silu": 0, "gelu_tanh": 1, "relu2": 2})  # likewise


def supports(args: ExpertsArgs) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    if (reason := missing()) is not None:
        return reason
    if args.x.dtype != jnp.float32:
        return f"tokens are {args.x.dtype}, not float32"
    if args.activation.kind not in GATES:
        return f"the activation is {args.activation.kind}, not one of {', '.join(GATES)}"
    for stack in (args.gate_up, args.down):
        if (kind := kind_of(stack)) not in KINDS:
            return f"{kind} weights are not in lanes"
        _, outputs, inputs = size_of(stack)
        if outputs % LANES or inputs % LANES:  # floats are read as many at a time
            return f"{outputs} outputs of {inputs} inputs are not multiples of {LANES}"
        if not isinstance(stack, Quantised):
            continue
        if inputs % BLOCK:
            return f"{inputs} inputs are not a multiple of {BLOCK}"
        if (misfit := misfit_of(stack.form)) is not None:
            return misfit
    return None


def experts(args: ExpertsArgs) -> jax.Array:  # [T, D]
    """See ``experts.api``."""
    activation = args.activation
    limits = activation.limits or (math.inf, math.inf)
    results = (
        jax.ShapeDtypeStruct(args.x.shape, jnp.float32),
        jax.ShapeDtypeStruct((workspace_bytes(args),), jnp.uint8),
    )
    stacks = (*arrays_of(args.gate_up), *arrays_of(args.down))
    out, _ = call(
        EXPERTS,
        results,
        *(args.x, args.choices, args.weights, *stacks, args.gate_up_bias, args.down_bias),
        gate_kind=np.int64(KINDS[kind_of(args.gate_up)]),
        down_kind=np.int64(KINDS[kind_of(args.down)]),
        gate=np.int64(GATES[activation.kind]),
        gate_limit=np.float32(limits[0]),
        limit=np.float32(limits[1]),
        alpha=np.float32(activation.alpha),
        shift=np.float32(activation.shift),
    )
    return out


def workspace_bytes(args: ExpertsArgs) -> int:
    """Bytes of the rows, their hidden values and their activations as records: see experts.inc."""
    pairs = math.prod(args.choices.shape)
    count, width, inner = size_of(args.down)
    stacks = (args.gate_up, args.down)
    records = max(record_bytes(w) if isinstance(w, Quantised) else 0 for w in stacks)
    padded = pairs + PADDING * min(count, pairs)
    return 4 * pairs * (width + (1 + args.activation.halves) * inner) + padded * records
