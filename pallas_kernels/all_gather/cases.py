"""Named calls of all_gather on one device, where it leaves out the last columns."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.all_gather.ref import AllGatherArgs
from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal


@dataclass(frozen=True)
class AllGatherCase:
    """``columns`` of a matrix [``tokens``, ``width``]."""

    name: str
    tokens: int
    width: int
    columns: int
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)


CASES = (
    AllGatherCase("uneven", 3, 203, 200),
    AllGatherCase("wide_bf16", 2, 4096, 4096, "bfloat16"),
    *(AllGatherCase(f"qwen3_t{t}", t, 151936, 151936, tags=("bench", "gpu")) for t in (1, 8, 64)),
)


def build(case: AllGatherCase, seed: int) -> Inputs:
    """Random values; those of the columns that are left out are NaN."""
    x = normal(np.random.default_rng(seed), (case.tokens, case.width), jnp.dtype(case.dtype))
    x[:, case.columns :] = np.nan
    return Inputs((AllGatherArgs(x=x, columns=case.columns),))  # type: ignore[arg-type]


def cost(case: AllGatherCase) -> Cost:
    """Each value of the result read and written once."""
    return Cost(2 * case.tokens * case.columns * jnp.dtype(case.dtype).itemsize, 0)
