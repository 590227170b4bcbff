"""Limits and gates in words: ``ttft_p99<200ms``, ``tpot_p50<=1.0*vllm``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.core.errors import BenchError

_FORM = re.compile(
    r"\s*(?P<metric>[a-z]\w*)\s*(?P<sign><=|>=|<|>)\s*(?:(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)?)?"
    r"\s*(?P<star>\*)?\s*(?P<peer>[a-z]\w*)?\s*"
)
_STATISTIC = re.compile(r"(ttft|tpot|itl|e2el?)_(p\d+(?:\.\d+)?|median|mean|std)")


@dataclass(frozen=True)
class Gate:
    """A bound on a figure, or on its ratio to a peer's."""

    text: str
    metric: str  # a name of ``figures.summarize``
    sign: str
    bound: float  # in the figure's own unit, or a factor of the peer's figure
    peer: str = ""

    def holds(self, value: float) -> bool:
        """True if a figure or a ratio meets the bound."""
        match self.sign:
            case "<":
                return value < self.bound
            case "<=":
                return value <= self.bound
            case ">":
                return value > self.bound
        return value >= self.bound


def gate_of(text: str) -> Gate:
    """Read one gate; raises ``BenchError`` if it is not of the form of the examples above."""
    found = _FORM.fullmatch(text)
    number, peer, star = (found["number"], found["peer"], found["star"]) if found else (None,) * 3
    if found is None or (number is None and peer is None) or (peer and number and not star):
        raise BenchError(
            f"{text!r} is no limit; write one such as ttft_p99<200ms or tpot_p50<=1.0*vllm"
        )
    if star and not peer or peer and found["unit"]:
        raise BenchError(f"{text!r} has a factor of no engine; write tpot_p50<=1.0*vllm")
    bound = float(number or 1.0) * (1e3 if found["unit"] == "s" else 1.0)
    return Gate(text.strip(), figure_name(found["metric"]), found["sign"], bound, peer or "")


def gates_of(text: str) -> list[Gate]:
    """Gates with commas between them."""
    return [gate_of(part) for part in text.split(",") if part.strip()]


def figure_name(metric: str) -> str:
    """``tpot_p50`` as the result has it, ``p50_tpot_ms``; other names are unchanged."""
    found = _STATISTIC.fullmatch(metric)
    if found is None:
        return metric
    name = "e2el" if found[1] == "e2e" else found[1]
    return f"{found[2]}_{name}_ms"


def worst(gate: Gate, figures: Iterable[Mapping[str, float]]) -> float | None:
    """The figure that is hardest to accept, over several series; None if one lacks it."""
    values = [one.get(gate.metric) for one in figures]
    known = [value for value in values if value is not None]
    if not values or len(known) < len(values):
        return None
    return max(known) if gate.sign.startswith("<") else min(known)


def verdict(
    gate: Gate, own: Sequence[Mapping[str, float]], ratios: Sequence[Mapping[str, Any]]
) -> dict[str, object]:
    """The verdict of a gate, its value, and why there is none.

    ``own``: the figures of our series. ``ratios``: those to each peer at each rate; a gate must
    hold at every rate.
    """
    if gate.peer:
        theirs = [one for one in ratios if one["peer"] == gate.peer]
        reasons = [one["reason"] for one in theirs if one["reason"]]
        medians = [{name: row["median"] for name, row in one["figures"].items()} for one in theirs]
        value = worst(gate, medians)
        reason = next(iter(reasons), f"{gate.peer} has no ratio of {gate.metric}")
    else:
        value, reason = worst(gate, own), f"the run has no {gate.metric}"
    return {
        "gate": gate.text,
        "value": value,
        "holds": value is not None and gate.holds(value),
        "reason": "" if value is not None else reason,
    }
