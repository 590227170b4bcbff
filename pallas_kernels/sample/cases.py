"""Named calls of sample on vocabularies of real models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.sample.ref import SampleArgs

QWEN3, SMOLLM2 = 151_936, 49_152


class Draw(NamedTuple):
    """Sampling parameters of a row; by default no filter."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = Draw(0.0, 7, np.nan, np.nan)  # its filters must not be read
PLAIN = Draw(1.0)
CHAT = Draw(0.7, top_k=50, top_p=0.9)
NUCLEUS = Draw(0.7, top_p=0.9)


@dataclass(frozen=True)
class SampleCase:
    """``rows`` are repeated up to ``batch``. Logits are normal with deviation ``spread``, rounded
    to multiples of ``grid`` (0: not at all); a share ``masked`` of them is -inf.
    """

    name: str
    vocab: int
    rows: tuple[Draw, ...]
    batch: int
    spread: float = 3.0
    grid: float = 0.0
    masked: float = 0.0
    tags: tuple[str, ...] = ("ci",)


MIXED = (
    GREEDY,
    PLAIN,
    Draw(0.7, top_k=1),
    Draw(1.3, top_k=5),
    Draw(1.0, top_k=-1, top_p=0.8),
    Draw(0.5, min_p=0.05),
    Draw(1.0, min_p=0.2, top_p=0.5),
    Draw(2.0, top_k=40, top_p=0.95, min_p=0.001),
)
HARD = (  # most of the vocabulary is kept, or blocks say little about the threshold
    Draw(5.0, top_p=0.999),
    Draw(9.0, top_k=20_000),
    Draw(1.0, top_k=10**6),
    Draw(4.0, top_k=3000, top_p=0.7),
    Draw(1e-3, top_p=0.5),
    Draw(50.0, min_p=0.3, top_p=0.99),
)
LISTED = (  # too many candidates for one CTA's registers, few enough for lists
    Draw(1.0, top_k=2000),
    Draw(0.9, top_k=3000, top_p=0.8),
    Draw(1.2, top_k=1500, min_p=0.001),
    Draw(0.7, top_p=0.9),
    Draw(1.0, top_p=0.5),
)


def _step(batch: int, name: str, draw: Draw) -> SampleCase:
    """Rows of a decode step on a GPU."""
    return SampleCase(f"qwen3_b{batch}_{name}", QWEN3, (draw,), batch, tags=("bench", "gpu"))


CASES = (
    SampleCase("one_token", 1, (GREEDY, PLAIN, CHAT), 3),
    SampleCase("less_than_a_block", 50, MIXED, 24),
    SampleCase("tiny", 320, MIXED, 16),
    SampleCase("odd", 1001, MIXED, 8),
    SampleCase("equal_logits", 320, MIXED, 24, grid=1.0),
    SampleCase("all_equal", 1001, MIXED, 8, spread=0.0),
    SampleCase("mostly_masked", 1001, MIXED, 16, masked=0.97),
    SampleCase("all_masked", 320, MIXED, 8, masked=1.0),
    SampleCase("hard_odd", 1001, HARD, 6, spread=1.0),
    SampleCase("smollm2", SMOLLM2, (GREEDY, NUCLEUS, CHAT), 3),
    SampleCase("padding_rows", 9001, (CHAT, *(GREEDY,) * 63), 64),
    SampleCase("smollm2_hard", SMOLLM2, HARD, 6),
    SampleCase("smollm2_listed", SMOLLM2, LISTED, 5),
    SampleCase("qwen3", QWEN3, (CHAT,), 1),
    SampleCase("smollm2_b16_sampled", SMOLLM2, (CHAT,), 16, tags=("bench",)),
    *(_step(batch, "greedy", GREEDY) for batch in (1, 64, 256)),
    *(_step(batch, "sampled", CHAT) for batch in (1, 64, 256)),
    *(_step(batch, "top_p", NUCLEUS) for batch in (1, 64, 256)),
    _step(256, "temperature", PLAIN),
    _step(256, "top_k", Draw(0.7, top_k=50)),
    _step(256, "min_p", Draw(1.0, min_p=0.05)),
    _step(256, "wide_top_p", Draw(5.0, top_p=0.99)),
)


def build(case: SampleCase, seed: int) -> Inputs:
    """Random logits, seeds and positions. Rows of temperature 0 have junk for other parameters."""
    rng = np.random.default_rng(seed)
    shape = (case.batch, case.vocab)
    logits = rng.standard_normal(shape, np.float32) * np.float32(case.spread)
    if case.grid:
        logits = np.round(logits / case.grid).astype(np.float32) * np.float32(case.grid)
    if case.masked:
        logits[rng.random(shape) < case.masked] = -np.inf
    repeats = -(-case.batch // len(case.rows))
    columns = zip(*(case.rows * repeats)[: case.batch], strict=True)
    types = (np.float32, np.int32, np.float32, np.float32)
    draws = [np.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    seeds = rng.integers(-(2**31), 2**31, (2, case.batch)).astype(np.int32)
    positions = rng.integers(0, 40_960, case.batch).astype(np.int32)
    args: dict[str, Any] = {
        "logits": logits,
        **dict(zip(("temperature", "top_k", "top_p", "min_p"), draws, strict=True)),
        "seed_low": seeds[0],
        "seed_high": seeds[1],
        "positions": positions,
    }
    return Inputs((SampleArgs(**args),))


def cost(case: SampleCase) -> Cost:
    """The logits read once and compared; sampled rows also sum probabilities."""
    entries = case.batch * case.vocab
    drawn = any(draw.temperature > 0 for draw in case.rows)
    return Cost(4 * entries, entries * (4 if drawn else 1))
