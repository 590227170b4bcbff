"""Every figure and verdict of a run, as a pure function of its description and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from jaxinfer.bench.figures import is_answered, summarize
from jaxinfer.bench.gates import gate_of, verdict, worst
from jaxinfer.bench.numbers import interval
from jaxinfer.bench.profile_table import Profiled, tables_of
from jaxinfer.bench.records import COMPLETE, MISSING, Record, Run, Series

OURS = "jaxinfer"
TIERS = ("cold", "device", "host")  # where the pages of a prompt are: see ``offload``
TIER_FACTS = (
    *("restored_gb_per_s", "link_gb_per_s", "restored_prompts"),
    *("others_tpot_ms", "others_alone_tpot_ms"),
)

type Figures = Mapping[str, Mapping[str, float]]  # by series
type Records = Mapping[str, Sequence[Record]]  # by series


def results_of(run: Run, records: Records, profiled: Profiled | None = None) -> dict[str, Any]:
    """The result of a run: figures by series, and the ratios, capacity and gates of its command;
    with a profile, the table of its ops.
    """
    figures = {
        one.name: summarize(
            records[one.name],
            percentiles=run.percentiles,
            metrics=run.metrics,
            goodput=run.goodput,
        )
        for one in run.series
        if one.state != MISSING
    }
    result: dict[str, Any] = {"state": run.state, "reason": run.reason, "series": figures}
    if run.command == "compare" or peers_of(run):
        result["ratios"] = {
            _title(run, peer, rate): _ratios(run, peer, rate, records, figures)
            for peer in peers_of(run)
            for rate in rates_of(run)
        }
    if run.command == "offload":
        facts = {one.name: one.facts for one in run.series}
        result["tiers"] = tiers_of(figures, facts)
    if run.limits:
        result["capacity"] = capacity_of(run, figures)
    if run.gates:
        own = [figures[one.name] for one in _complete(run, base_of(run))]
        ratios = list(result.get("ratios", {}).values())
        result["gates"] = [verdict(gate_of(text), own, ratios) for text in run.gates]
    if profiled is not None:
        result["profile"] = tables_of(profiled)
    return result


def rates_of(run: Run) -> list[float | None]:
    """The rates of a run's series, in their order."""
    return list(dict.fromkeys(one.rate for one in run.series))


def _title(run: Run, peer: str, rate: float | None) -> str:
    if len(rates_of(run)) == 1:
        return peer
    return f"{peer} at {'inf' if rate is None else f'{rate:g}'} requests a second"


def base_of(run: Run) -> str:
    """The engine whose figures are divided by others: jaxinfer, or else the first."""
    names = [one.backend for one in run.series]
    return OURS if OURS in names or not names else names[0]


def peers_of(run: Run) -> list[str]:
    """The other engines of a comparison, in their order."""
    names = dict.fromkeys(one.backend for one in run.series)
    return [name for name in names if name != base_of(run)]


def _complete(run: Run, backend: str) -> list[Series]:
    return [one for one in run.series if one.backend == backend and one.state == COMPLETE]


def _ratios(
    run: Run, peer: str, rate: float | None, records: Records, figures: Figures
) -> dict[str, Any]:
    """Our figures at a rate divided by a peer's, of each round that both completed; or the reason
    why there are none.
    """
    found = _ratios_of_rounds(run, peer, rate, records, figures)
    return {"peer": peer, "rate": rate, **found}


def _ratios_of_rounds(
    run: Run, peer: str, rate: float | None, records: Records, figures: Figures
) -> dict[str, Any]:
    ours, theirs = (
        {one.round: one.name for one in _complete(run, name) if one.rate == rate}
        for name in (base_of(run), peer)
    )
    rounds = sorted(ours.keys() & theirs.keys())
    if not rounds:
        absent = [one for one in run.series if one.backend == peer and one.reason]
        reason = absent[0].reason if absent else "no round has both engines"
        return {"reason": reason, "rounds": [], "figures": {}}
    hashes = {one.name: one.workload for one in run.series}
    for number in rounds:
        if hashes[ours[number]] != hashes[theirs[number]]:
            reason = f"no ratio: round {number} sent them different requests"
            return {"reason": reason, "rounds": rounds, "figures": {}}
        if difference := count_difference(records[ours[number]], records[theirs[number]]):
            reason = f"no ratio: in round {number} {difference}"
            return {"reason": reason, "rounds": rounds, "figures": {}}
    rows: dict[str, Any] = {}
    for name in figures[ours[rounds[0]]]:
        if not is_compared(name):
            continue
        pairs = [tuple(figures[one[n]].get(name, 0.0) for one in (ours, theirs)) for n in rounds]
        if all(all(pair) for pair in pairs):
            ratios = [a / b for a, b in pairs]
            rows[name] = {
                "rounds": ratios,
                "median": median(ratios),
                "interval": interval(ratios),
            }
    return {"reason": "", "rounds": rounds, "figures": rows}


def is_compared(figure: str) -> bool:
    """True for figures of speed; counts and spreads have no ratio."""
    return figure.endswith("throughput") or (
        figure.endswith("_ms") and not figure.startswith("std_")
    )


def is_worse(figure: str, ratio: float) -> bool:
    """True if our figure, divided by a peer's, is on the slower side of 1."""
    return ratio < 1 if figure.endswith("throughput") else ratio > 1


def count_difference(ours: Sequence[Record], theirs: Sequence[Record]) -> str:
    """A clause if the engines did not do the same work; "" if they did."""
    if len(ours) != len(theirs):
        return f"one engine has {len(ours)} requests and the other {len(theirs)}"
    if failed := sum(not is_answered(one) for one in [*ours, *theirs]):
        return f"{failed} requests failed"
    if uncounted := sum(not one.is_counted for one in [*ours, *theirs]):
        return f"{uncounted} answers have no counts of tokens"
    for what in ("prompt_tokens", "output_tokens"):
        pairs = [(getattr(a, what), getattr(b, what)) for a, b in zip(ours, theirs, strict=True)]
        if unequal := [pair for pair in pairs if pair[0] != pair[1]]:
            a, b = unequal[0]
            words = what.replace("_", " ")
            return (
                f"the {words} of {len(unequal)} of {len(pairs)} requests differ, the first by "
                f"{a} and {b}"
            )
    return ""


def tiers_of(figures: Figures, facts: Figures) -> list[dict[str, Any]]:
    """A row for each length of ``offload``: medians in ms, the ratios of a computed prompt's to the
    others, what a hit on the device takes at most in 99 of 100 cases, and those of ``TIER_FACTS``
    that were measured while prompts were restored.
    """
    lengths = dict.fromkeys(name.rpartition("-")[2] for name in figures)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        names = {kind: f"{kind}-{length}" for kind in TIERS}
        if any("median_ttft_ms" not in figures.get(name, ()) for name in names.values()):
            continue
        times = {kind: figures[name]["median_ttft_ms"] for kind, name in names.items()}
        over = {f"cold_over_{kind}": times["cold"] / times[kind] for kind in TIERS[1:]}
        row = {"length": int(length), **times, **over}
        if (p99 := figures[names["device"]].get("p99_ttft_ms")) is not None:
            row["device_p99"] = p99
        own = facts[names["host"]]
        rows.append(row | {name: own[name] for name in TIER_FACTS if name in own})
    return rows


def level_meets(run: Run, series: Series, figures: Figures) -> bool:
    """True if a level of a sweep is complete, without failures, and within all limits."""
    own = figures[series.name]
    if series.state != COMPLETE or own.get("failed") or not own.get("completed"):
        return False
    limits = map(gate_of, run.limits)
    found = [(limit, worst(limit, [own])) for limit in limits]
    return all(value is not None and limit.holds(value) for limit, value in found)


def capacity_of(run: Run, figures: Figures) -> dict[str, Any]:
    """The highest rate below every one that exceeds a limit; None if no rate meets the limits."""
    levels = sorted(
        (one.rate, level_meets(run, one, figures))
        for one in run.series
        if one.rate is not None and one.state != MISSING
    )
    misses = [rate for rate, meets in levels if not meets]
    first_miss = min(misses, default=None)
    met = [rate for rate, meets in levels if meets and (first_miss is None or rate < first_miss)]
    return {
        "limits": run.limits,
        "requests_per_second": max(met, default=None),
        "first_miss": first_miss,
        "levels": [{"rate": rate, "meets": meets} for rate, meets in levels],
    }
