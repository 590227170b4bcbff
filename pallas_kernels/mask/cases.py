"""Named calls of mask for rows that want none. Its reads of the board have their own test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.mask.ref import MaskArgs


@dataclass(frozen=True)
class MaskCase:
    """Logits of a step's rows, none of which wants a mask."""

    name: str
    rows: int
    vocab: int
    tags: tuple[str, ...] = ("ci",)


CASES = (
    MaskCase("one_row", 1, 320),
    MaskCase("odd", 5, 1031),
    *(MaskCase(f"qwen3_b{rows}", rows, 151_936, ("bench", "gpu")) for rows in (1, 64, 512)),
)


def build(case: MaskCase, seed: int) -> Inputs:
    """Random logits."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((case.rows, case.vocab), np.float32)
    ones, slots = np.ones(case.rows, np.int32), np.arange(case.rows, dtype=np.int32)
    args: dict[str, Any] = {
        "logits": logits,
        "finite": ones,
        "wanted": 0 * ones,
        "slots": slots,
        "place": np.array([0, 0, 7], np.int32),
    }
    return Inputs((MaskArgs(**args, num_slots=case.rows),))


def cost(case: MaskCase) -> Cost:
    """Without a mask only the rows' numbers are read."""
    return Cost(16 * case.rows, 0)
