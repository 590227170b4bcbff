"""The seconds of a step, from what it computes: fitted to measured steps, or a device's estimate.

Owns: the measure of a step's work, the fit, and the forms in which costs are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxinfer.bench.floor import Floor
from jaxinfer.core.errors import BenchError
from jaxinfer.core.step import StepPlan

# The context of a row of bench.step's "tpot" b1 to b256: 1,024 tokens of prompt, half of 64 drawn
STEP_CONTEXT = 1056
ROUNDS = 1000  # of a fit, at most
REWEIGHTED = 8  # fits, each relative to the times of the one before


@dataclass(frozen=True)
class Work:
    """The work of a step: rows and prompt tokens with the padding of its bucket; the entries that
    decode rows attend to, all together (``context``), and pairs of a query and a key in prompts.
    """

    decodes: int = 0
    context: int = 0
    prefills: int = 0
    tokens: int = 0
    pairs: int = 0


def work_of(plan: StepPlan) -> Work:
    """The work of a planned step."""
    bucket, context, pairs = plan.bucket, 0, 0
    for row in plan.prefills:
        count = row.num_scheduled_tokens
        pairs += count * row.num_computed_tokens + count * (count + 1) // 2
    for row in plan.decodes:
        context += row.num_computed_tokens + row.num_scheduled_tokens
    rows = bucket.num_decode_tokens, bucket.num_prefills
    return Work(rows[0], context, rows[1], bucket.num_prefill_tokens, pairs)


class StepCosts(Protocol):
    """The time of a step."""

    def seconds(self, work: Work) -> float:
        """Seconds of a step with this work."""
        ...


@dataclass(frozen=True)
class LinearCosts:
    """Seconds of a step, and of each row, token, entry of context and pair in it."""

    step: float = 0.0
    row: float = 0.0
    token: float = 0.0
    context: float = 0.0
    pair: float = 0.0

    def seconds(self, work: Work) -> float:
        """See ``StepCosts``."""
        factors = (self.step, self.row, self.token, self.context, self.pair)
        return sum(a * b for a, b in zip(factors, _features(work), strict=True))


@dataclass(frozen=True)
class EstimatedCosts:
    """The shortest time of a step on a device, over the share of it that engines have reached."""

    floor: Floor
    reached_decode: float
    reached_prefill: float

    def seconds(self, work: Work) -> float:
        """See ``StepCosts``."""
        costs, ceiling = self.floor.costs, self.floor.ceiling
        tokens, rows = work.tokens + work.decodes, work.decodes + work.prefills
        size = costs.bytes_of_weights(tokens) + work.context * costs.kv_bytes
        size += 2 * rows * costs.state_bytes
        flops = tokens * costs.token_flops + rows * costs.head_flops
        flops += (work.context + work.pairs) * costs.pair_flops
        seconds = max(size / ceiling.bytes_per_s, flops / ceiling.flops_per_s)
        return seconds / (self.reached_prefill if work.tokens else self.reached_decode)


def _features(work: Work) -> tuple[int, int, int, int, int]:
    return 1, work.decodes + work.prefills, work.tokens, work.context, work.pairs


def fitted(samples: Iterable[tuple[Work, float]]) -> LinearCosts:
    """The costs, none below zero, with the least squares of errors relative to the fitted time.

    Relative to the measured time, steps that something else delayed would count least and the fit
    would be too short. Raises ``BenchError`` without samples.
    """
    given = [(work, seconds) for work, seconds in samples if seconds > 0]
    if not given:
        raise BenchError("no measured step to fit costs to; give --cost, or a file with steps")
    rows = np.array([_features(work) for work, _ in given], np.float64)
    seconds = np.array([seconds for _, seconds in given])
    expected, found = seconds, np.zeros(rows.shape[1])
    for _ in range(REWEIGHTED):
        scaled = rows / expected[:, None]
        scales = np.maximum(np.sqrt((scaled**2).sum(axis=0)), 1e-300)
        found = _least_squares(scaled / scales, seconds / expected) / scales
        expected = np.maximum(rows @ found, seconds.min())
    return LinearCosts(*found.tolist())


def _least_squares(rows: np.ndarray[Any, Any], goal: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """x >= 0 with the least |rows x - goal|, by Lawson and Hanson's active sets."""
    count = rows.shape[1]
    x, is_free = np.zeros(count), np.zeros(count, np.bool_)
    for _ in range(ROUNDS):
        gain = rows.T @ (goal - rows @ x)
        gain[is_free] = -np.inf
        if is_free.all() or gain.max() <= 1e-9:
            break
        is_free[int(gain.argmax())] = True
        while True:
            best = np.zeros(count)
            best[is_free] = np.linalg.lstsq(rows[:, is_free], goal, rcond=None)[0]
            negative = is_free & (best <= 0)
            if not negative.any():
                x = best
                break
            steps = x[negative] / (x[negative] - best[negative])
            x = x + steps.min() * (best - x)
            is_free &= x > 1e-15
            x[~is_free] = 0.0
    return x


def costs_of_text(text: str) -> LinearCosts:
    """``step=0.004,token=2e-5`` as costs, seconds each; raises ``BenchError`` for other words."""
    names = [item.name for item in fields(LinearCosts)]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            values["?"] = 0.0
        if name.strip() not in names or "?" in values or values[name.strip()] < 0:
            raise BenchError(
                f"{part!r} is no cost; write seconds of some of {', '.join(names)}, such as "
                "step=0.004,token=2e-5"
            )
    return LinearCosts(**values)


def read_costs(path: Path) -> LinearCosts:
    """Costs from a file of JSON: ``costs`` or ``steps`` as a bench writes them, or the rows of
    ``bench.step``. Raises ``BenchError`` if it has none of these.
    """
    try:
        found = json.loads(path.read_text())
        if "costs" in found:
            return LinearCosts(**found["costs"])
        if "steps" in found:
            return fitted((Work(**step["work"]), step["seconds"]) for step in found["steps"])
        return fitted(sample for row in found["rows"] for sample in _samples_of_row(row))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BenchError(
            f"{path} has no measured steps ({type(error).__name__}: {error}); give a JSON file "
            "with `costs`, `steps` or the rows of bench.step"
        ) from error


def _samples_of_row(row: Mapping[str, Any]) -> Iterable[tuple[Work, float]]:
    """The step that a row of ``bench.step`` measures, if it is one."""
    metric, case = row["metric"], str(row["case"])
    if metric == "tpot_ms" and case.startswith("b"):
        batch, _, context = case[1:].partition("/")
        total = int(batch) * int(context or STEP_CONTEXT)
        yield Work(decodes=int(batch), context=total), row["value"] / 1e3
    elif metric == "ttft_ms" and case.isdecimal():
        count = int(case)
        yield Work(prefills=1, tokens=count, pairs=count * (count + 1) // 2), row["value"] / 1e3
