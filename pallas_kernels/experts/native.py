"""experts by the native library: in float32, or with 16-bit activations and quantised weights.

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
from pallas_kernels.quantised_gemm.native import BLOCK, block_of
from pallas_kernels.quantised_gemm.native import KINDS as QUANTISED_KINDS

LANES = 16  # outputs of a tile; floats are read as many at a time
PADDING = 8  # rows of an expert are padded to whole tiles of tokens
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
        if outputs % LANES or inputs % LANES:
            return f"{outputs} outputs of {inputs} inputs are not multiples of {LANES}"
        group = inputs if kind == PLAIN else Quantised(kind, *stack).group
        if kind != PLAIN and (inputs % BLOCK or (group % BLOCK and group != BLOCK // 2)):
            return f"{inputs} inputs in groups of {group} do not fit blocks of {BLOCK}"
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
    """Bytes of the rows, their hidden values and their rounded activations, as in experts.inc."""
    gate_up, down = stacks[:NUM_ARRAYS], stacks[NUM_ARRAYS:]
    pairs = math.prod(choices)
    count, width, inner = size_of(kinds[1], down)  # type: ignore[arg-type]
    records = max(_record_bytes(kinds[0], gate_up), _record_bytes(kinds[1], down))
    padded = pairs + PADDING * min(count, pairs)
    return 4 * pairs * (width + 3 * inner) + padded * records


def _record_bytes(kind: str, stack: list[Any]) -> int:
    """Bytes of one row's rounded activations: see ``quantised_gemm.native.workspace_bytes``."""
    if kind == PLAIN:
        return 0
    w = Quantised(kind, *stack)
    block = block_of(w.group)
    return w.num_inputs // block * (2 * block + 8) + w.num_inputs // w.group * 4
