"""experts by the native library, with weights in float32 or quantised.

Rows are sorted by expert; only the weights of experts that a token chose are read. The arithmetic
of quantised weights is that of ``quantised_gemm.native``. A token's result depends neither on the
other tokens nor on the number of threads.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.experts.ref import NUM_ARRAYS
from pallas_kernels.experts.stack import PLAIN, Activation, size_of
from pallas_kernels.native.library import EXPERTS, call, missing
from pallas_kernels.quantised import Quantised
from pallas_kernels.quantised_gemm.native import BLOCK, LANES, PADDING, misfit_of, record_bytes
from pallas_kernels.quantised_gemm.native import KINDS as QUANTISED_KINDS

KINDS = MappingProxyType({**QUANTISED_KINDS, PLAIN: 3})  # as in kernel.h


def supports(
    x: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    *arrays: Any,  # of gate_up, of down, and both biases
    kinds: tuple[str, str],
    activation: Activation,
    split: bool,
) -> str | None:
    """Why the native kernel cannot run the call, or None."""
    del choices, weights, activation, split
    if (reason := missing()) is not None:
        return reason
    if x.dtype != jnp.float32:
        return f"tokens are {x.dtype}, not float32"
    stacks = (arrays[:NUM_ARRAYS], arrays[NUM_ARRAYS : 2 * NUM_ARRAYS])
    for kind, stack in zip(kinds, stacks, strict=True):
        if kind not in KINDS:
            return f"{kind} weights are not in lanes"
        _, outputs, inputs = size_of(kind, stack)  # type: ignore[arg-type]
        if outputs % LANES or inputs % LANES:  # floats are read as many at a time
            return f"{outputs} outputs of {inputs} inputs are not multiples of {LANES}"
        if kind == PLAIN:
            continue
        if inputs % BLOCK:
            return f"{inputs} inputs are not a multiple of {BLOCK}"
        if (misfit := misfit_of(Quantised(kind, *stack).form)) is not None:
            return misfit
    return None


def experts(
    x: jax.Array,  # [T, D]
    choices: jax.Array,  # int32[T, k]
    weights: jax.Array,  # float32[T, k]
    *arrays: Any,  # of gate_up, of down, and both biases
    kinds: tuple[str, str],
    activation: Activation,
    split: bool,
) -> jax.Array:  # [T, D]
    """See ``experts.api``."""
    del split
    *stacks, gate_up_bias, down_bias = arrays
    results = (
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct((workspace_bytes(choices.shape, kinds, stacks),), jnp.uint8),
    )
    out, _ = call(
        EXPERTS,
        results,
        *(x, choices, weights, *stacks, gate_up_bias, down_bias),
        gate_kind=np.int64(KINDS[kinds[0]]),
        down_kind=np.int64(KINDS[kinds[1]]),
        limit=np.float32(math.inf if activation.limit is None else activation.limit),
        alpha=np.float32(activation.alpha),
        shift=np.float32(activation.shift),
    )
    return out


def workspace_bytes(choices: tuple[int, ...], kinds: tuple[str, str], stacks: list[Any]) -> int:
    """Bytes of the rows, their hidden values and their activations as records: see experts.inc."""
    gate_up, down = stacks[:NUM_ARRAYS], stacks[NUM_ARRAYS:]
    pairs = math.prod(choices)
    count, width, inner = size_of(kinds[1], down)  # type: ignore[arg-type]
    records = max(
        0 if kind == PLAIN else record_bytes(Quantised(kind, *stack))
        for kind, stack in zip(kinds, (gate_up, down), strict=True)
    )
    padded = pairs + PADDING * min(count, pairs)
    return 4 * pairs * (width + 3 * inner) + padded * records
