"""Named calls of publish. Its writes to host memory are not a result; they have their own test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.publish.ref import PublishArgs


@dataclass(frozen=True)
class PublishCase:
    """Tokens of a step's rows, without an address."""

    name: str
    rows: int
    tags: tuple[str, ...] = ("ci",)


CASES = (
    PublishCase("one_row", 1),
    PublishCase("odd", 13),
    PublishCase("prompts_and_rows", 568),
    *(PublishCase(f"b{rows}", rows, ("bench", "gpu")) for rows in (1, 64, 512)),
)


def build(case: PublishCase, seed: int) -> Inputs:
    """Random tokens, the largest among them; the address is 0."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2**31, size=case.rows).astype(np.int32)
    tokens[0] = 2**31 - 1
    args: Any = {"tokens": tokens, "place": np.array([0, 0, 7], np.int32)}
    return Inputs((PublishArgs(**args),))


def cost(case: PublishCase) -> Cost:
    """Tokens read and written."""
    return Cost(8 * case.rows, 0)
