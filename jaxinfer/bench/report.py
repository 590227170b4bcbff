"""``report.md``: a run's result as Markdown, a pure function of the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxinfer.bench.figures import COUNTS, DEFINITIONS, METRICS
from jaxinfer.bench.records import COMPLETE, MISSING, Run
from jaxinfer.bench.results import is_worse

NOTHING = "–"


def report_text(run: Run, environment: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The whole report."""
    parts = [
        [f"# jaxinfer bench {run.command}", ""],
        _state(run),
        _worse(result),
        _gates(result),
        _capacity(result),
        _tiers(result),
        _figures(run, result),
        _ratios(result),
        profile_lines(result),
        ["## Definitions", "", *_definitions(run, profiled="profile" in result), ""],
        ["## Circumstances", "", *_circumstances(run, environment), ""],
    ]
    return "\n".join(line for part in parts for line in part)


def _state(run: Run) -> list[str]:
    absent = [one for one in run.series if one.state != COMPLETE]
    if run.state == COMPLETE and not absent:
        return []
    reason = f": {run.reason}" if run.reason else ""
    lines = [f"**This run is {run.state}{reason}.**", ""]
    lines += [f"- {one.name} is {one.state}: {one.reason}" for one in absent]
    return [*lines, ""]


def _worse(result: Mapping[str, Any]) -> list[str]:
    """Every ratio on the slower side of a peer, before anything else."""
    lines = [
        f"- {figure}: {number(row['median'])} of {peer} {_between(row['interval'])}"
        for peer, one in result.get("ratios", {}).items()
        for figure, row in one["figures"].items()
        if is_worse(figure, row["median"])
    ]
    return ["## Slower than a peer", "", *lines, ""] if lines else []


def _between(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "(too few rounds for an interval)"
    low, high = map(number, interval)
    return f"(95 %: {low} to {high})"


def _gates(result: Mapping[str, Any]) -> list[str]:
    if not result.get("gates"):
        return []
    rows = [
        [one["gate"], number(one["value"]), "holds" if one["holds"] else "**fails**", one["reason"]]
        for one in result["gates"]
    ]
    return ["## Gates", "", *table(["gate", "value", "verdict", "why"], rows)]


def _capacity(result: Mapping[str, Any]) -> list[str]:
    found = result.get("capacity")
    if found is None:
        return []
    limits, rate = ", ".join(found["limits"]), found["requests_per_second"]
    if rate is None:
        return ["## Capacity", "", f"No rate that was tried meets {limits}.", ""]
    miss = found["first_miss"]
    until = f"; {miss:g} exceeds a limit" if miss is not None else "; no higher rate was tried"
    return ["## Capacity", "", f"{rate:g} requests a second within {limits}{until}.", ""]


def _tiers(result: Mapping[str, Any]) -> list[str]:
    rows = result.get("tiers", ())
    if not rows:
        return []
    heads = {
        "length": "tokens",
        "cold": "computed, ms",
        "device": "on the device, ms",
        "device_p99": "its p99, ms",
        "host": "in host memory, ms",
        "cold_over_device": "computed / device",
        "cold_over_host": "computed / host",
        "restored_prompts": "restored",
        "restored_gb_per_s": "restored, GB/s",
        "link_gb_per_s": "link, GB/s",
        "others_tpot_ms": "TPOT of others, ms",
        "others_alone_tpot_ms": "alone, ms",
    }
    names = [name for name in heads if any(name in row for row in rows)]
    shown = [[number(row.get(name)) for name in names] for row in rows]
    return ["## First tokens", "", *table([heads[name] for name in names], shown)]


def _figures(run: Run, result: Mapping[str, Any]) -> list[str]:
    shown = [one for one in run.series if one.state != MISSING]
    if not shown:
        return ["No series was measured.", ""]
    names = list(dict.fromkeys(key for one in shown for key in result["series"][one.name]))
    counts = {key: label for label, key in COUNTS.items()}
    rows = [
        [_label(name, counts), *(number(result["series"][one.name].get(name)) for one in shown)]
        for name in names
    ]
    rows += [
        [fact, *(number(one.facts.get(fact)) for one in shown)]
        for fact in dict.fromkeys(fact for one in shown for fact in one.facts)
    ]
    return ["## Figures", "", *table(["", *(one.name for one in shown)], rows)]


def _label(name: str, counts: Mapping[str, str]) -> str:
    return counts.get(name, name.replace("_", " "))


def _ratios(result: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for peer, one in result.get("ratios", {}).items():
        lines += [f"## Divided by {peer}", ""]
        if one["reason"]:
            lines += [f"{one['reason']}.", ""]
            continue
        rows = [
            [figure, number(row["median"]), _between(row["interval"])[1:-1]]
            + [number(ratio) for ratio in row["rounds"]]
            for figure, row in one["figures"].items()
        ]
        lines += table(
            ["figure", "median", "interval", *(f"round {n}" for n in one["rounds"])], rows
        )
    return lines


def profile_lines(result: Mapping[str, Any]) -> list[str]:
    """The ops of a profile, a table for each bucket."""
    found = result.get("profile")
    if found is None:
        return []
    lines = ["## Profile", ""]
    for one in found["buckets"]:
        words = (
            f"Bucket {one['bucket']}, steps: {one['steps']}, requests: {one['requests']}, on "
            f"{found['device']}: {number(one['device_us'])} us of the device a step, "
            f"{number(one['wall_us'])} us until the host had its result"
        )
        if one["floor_us"] is not None:
            words += f"; the floor of the step is {number(one['floor_us'])} us"
        if one["gemm_floor_us"] is not None:
            words += f", of all its matrices {number(one['gemm_floor_us'])} us"
        rows = [
            [row["op"], number(row["calls"]), number(row["us"]), _percent(row["share"])]
            + [number(row["floor_us"]), _percent(row["share_of_floor"])]
            for row in one["rows"]
        ]
        heads = ["op", "calls", "us a step", "share of the step", "floor, us", "floor / us"]
        lines += [f"{words}.", "", *table(heads, rows)]
    if not found["buckets"]:
        lines += ["No kernel of the trace belongs to a step of the window.", ""]
    if found["outside_us"]:
        lines += [f"Kernels outside the steps took {number(found['outside_us'])} us.", ""]
    return lines


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f} %"


def _definitions(run: Run, *, profiled: bool) -> Iterator[str]:
    for name, words in DEFINITIONS.items():
        if name in METRICS and name not in run.metrics:
            continue
        yield f"- {name}: {words}."
    yield (
        "- p50, p90, p99: percentiles over all samples of a series, linear between neighbours; a "
        "ratio is ours divided by the peer's within a round, its interval a bootstrap over rounds."
    )
    yield (
        "- Tokens are counted by the server. The client's count is of the prompts that it sent as "
        "ids, and of the ids that chunks listed (`return_token_ids`)."
    )
    if profiled:
        yield (
            "- us a step: what an op adds to the device's time, so overlapping kernels count once; "
            "the floor is the op's least bytes and operations at the device's measured ceilings. A "
            "trace slows the host: wall times of profiled steps are longer than others."
        )
    if run.goodput:
        limits = ", ".join(f"{name} at most {ms:g} ms" for name, ms in run.goodput.items())
        yield f"- goodput: requests a second with {limits}."


def _circumstances(run: Run, environment: Mapping[str, Any]) -> Iterator[str]:
    yield f"- created {run.created}"
    for name, value in environment.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        yield f"- {name}: {text}"
    for name, value in sorted(run.settings.items()):
        yield f"- `{name}`: {value}"
    for one in run.series:
        if one.workload:
            yield f"- requests of {one.name}: {one.requests}, SHA-256 {one.workload[:16]}"


def number(value: float | None) -> str:
    """Four figures, or the whole number."""
    if value is None:
        return NOTHING
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown and an empty one; none without rows."""
    if not rows:
        return []
    rule = ["---", *("---:" for _ in heads[1:])]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, rule, *rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]
