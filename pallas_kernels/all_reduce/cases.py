"""Named calls of all_reduce on one device, where it adds split-K partials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.all_reduce.ref import AllReduceArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal


@dataclass(frozen=True)
class AllReduceCase:
    """``partials``: 0 for a result in the dtype, else the number in float32."""

    name: str
    tokens: int
    width: int
    partials: int
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


CASES = (
    AllReduceCase("uneven", 3, 203, 0),
    AllReduceCase("uneven_parts3", 5, 577, 3),
    AllReduceCase("smollm2_bf16", 17, 576, 0, "bfloat16"),
    AllReduceCase("qwen3_8b_parts4", 2, 4096, 4),
    *(AllReduceCase(f"qwen3_8b_t{t}", t, 4096, 4, tags=("bench", "gpu")) for t in (1, 8, 64)),
)


def build(case: AllReduceCase, seed: int) -> Inputs:
    """Random partials."""
    rng, size = np.random.default_rng(seed), (case.tokens, case.width)
    shape = (case.partials, *size) if case.partials else size
    partials: Any = normal(rng, shape, jnp.dtype(case.dtype))
    return Inputs((AllReduceArgs(partials=partials),))


def cost(case: AllReduceCase) -> Cost:
    """Partials read once, the sum written once."""
    size, item = case.tokens * case.width, jnp.dtype(case.dtype).itemsize
    return Cost(size * item * (max(case.partials, 1) + 1), size * case.partials)
