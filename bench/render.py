"""Results of a device as the Markdown tables of docs/performance.md, and a plot.

Run from the repository root with files of ``bench.step`` and ``bench.kernels``, and folders of
``jaxinfer bench serve --sweep``:

    .venv/bin/python -m bench.render bench/results/h200/*.json \\
        --peer bench/results/peers/vllm_h200.json [--plot docs/tpot.svg]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxinfer.bench.folder import read_folder
from jaxinfer.bench.plot import lines_plot
from jaxinfer.bench.report import table
from jaxinfer.bench.results import results_of

type Values = Mapping[tuple[str, str], Mapping[str, Any]]  # rows by (metric, case)

# targets for Qwen3-4B shapes on one H200: upper bounds of times, lower bounds of rates
MUST: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("tpot_ms", "b1"): 2.5,
        ("tpot_ms", "b8"): 2.8,
        ("tpot_ms", "b32"): 3.9,
        ("tpot_ms", "b64"): 5.3,
        ("tpot_ms", "b128"): 7.9,
        ("tpot_ms", "b256"): 13.2,
        ("ttft_ms", "512"): 10.0,
        ("ttft_ms", "1024"): 16.0,
        ("ttft_ms", "4096"): 58.0,
        ("ttft_ms", "16384"): 320.0,
        ("offline_tok_s", "greedy"): 12000.0,
        ("offline_tok_s", "sampled"): 12000.0,
        ("start_s", "no_bundle"): 30.0,
        ("start_s", "bundle"): 4.0,
    }
)
RATES = ("offline_tok_s",)  # metrics of which more is better
TITLES = MappingProxyType(
    {
        "tpot_ms": "TPOT, ms",
        "ttft_ms": "TTFT, ms",
        "offline_tok_s": "offline, output tokens/s",
        "start_s": "start until ready, s",
    }
)
NOTHING = "-"
SERVE = MappingProxyType(
    {
        "TTFT p50 / p99 ms": ("median_ttft_ms", "p99_ttft_ms"),
        "TPOT p50 / p99 ms": ("median_tpot_ms", "p99_tpot_ms"),
        "ITL p99 ms": ("p99_itl_ms",),
        "output tok/s": ("output_throughput",),
    }
)


def step_tables(report: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    """Every table for which the file has rows, as lines of Markdown."""
    ours, theirs = by_case(report["rows"]), by_case(peer["rows"])
    lines = [f"{report['device']}, jax {report['versions']['jax']}, commit {report['git']}", ""]
    for metric in TITLES:
        lines += _metric_table(metric, ours, theirs, peer["peer"])
    lines += _long_table(ours)
    lines += _small_table(ours)
    lines += _start_table(ours)
    lines += _memory_table(ours)
    lines += _ablation_table(ours)
    return lines


def by_case(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Rows by metric and case."""
    return {(row["metric"], row["case"]): row for row in rows}


def _metric_table(metric: str, ours: Values, theirs: Values, peer: str) -> list[str]:
    """The cases of the large model: ours, floor, peer, target."""
    rows: list[list[str]] = []
    for (name, case), row in ours.items():
        if name != metric or "/" in case:  # other lengths and other models have their own tables
            continue
        value, floor, rate = row["value"], row["floor"], metric in RATES
        other = theirs.get((metric, case), {}).get("value")
        must = MUST.get((metric, case))
        rows.append(
            [
                case.removeprefix("b") if metric == "tpot_ms" else case.replace("_", " "),
                number(value),
                number(floor),
                NOTHING if floor is None else f"{quotient(floor, value, rate):.0%}",
                number(other),
                NOTHING if other is None else f"{quotient(other, value, rate):.2f}",
                number(must),
                NOTHING if must is None else ("yes" if _met(value, must, rate) else "**no**"),
            ]
        )
    heads = [TITLES[metric], "ours", "floor", "of it", peer, "times as fast", "must", "met"]
    return table(heads, rows)


def quotient(reference: float, value: float, rate: bool) -> float:
    """A value as a share of a reference; more is better."""
    return value / reference if rate else reference / value


def _met(value: float, must: float, rate: bool) -> bool:
    return quotient(must, value, rate) >= 1


def _long_table(ours: Values) -> list[str]:
    """TPOT at a long context next to the prediction from the short one."""
    rows = [
        [case, number(row["value"]), number(row["predicted"]), f"{_over(row):+.1%}"]
        for (metric, case), row in ours.items()
        if metric == "tpot_ms" and "predicted" in row
    ]
    return table(["TPOT at batch/context, ms", "measured", "predicted", "over"], rows)


def _over(row: Mapping[str, Any]) -> float:
    return row["value"] / row["predicted"] - 1


def _small_table(ours: Values) -> list[str]:
    """GPT-2 shapes."""
    rows: list[list[str]] = []
    for (metric, case), row in ours.items():
        if not case.startswith("gpt2/") or metric == "device_busy":
            continue
        busy = ours.get(("device_busy", case))
        share = NOTHING if busy is None else f"{busy['value']:.0%}"
        name = f"{case.removeprefix('gpt2/')}: {TITLES[metric]}"
        rows.append([name, number(row["value"]), number(row["floor"]), share])
    return table(["GPT-2 shapes", "ours", "floor", "device busy"], rows)


def _start_table(ours: Values) -> list[str]:
    """The parts of a start."""
    cases = ("no_bundle", "bundle")
    names = [m for m, case in ours if m.startswith("start_") and case == cases[0]]
    rows = [
        [name.removeprefix("start_").replace("_", " "), *(_value(ours, name, c) for c in cases)]
        for name in names
        if name != "start_s"
    ]
    return table(["of a start", "no bundle", "bundle"], rows)


def _memory_table(ours: Values) -> list[str]:
    """The card's memory in use according to the driver, next to the configured share."""
    rows = [
        [case.replace("_", " "), f"{row['value']:.1%}", f"{row['asked']:.0%}"]
        for (metric, case), row in ours.items()
        if metric == "card_share"
    ]
    return table(["of the card's memory", "in use", "asked"], rows)


def _ablation_table(ours: Values) -> list[str]:
    """One setting changed at a time: TPOT by batch, TTFT by tokens."""
    titles = {"ablation_tpot_ms": "TPOT, batch", "ablation_ttft_ms": "TTFT,"}
    found = [(metric, *case.split("/")) for metric, case in ours if metric in titles]
    names = dict.fromkeys(name for _, name, _ in found)
    columns = dict.fromkeys((metric, size) for metric, _, size in found)
    rows = [
        [name, *(_value(ours, metric, f"{name}/{size}") for metric, size in columns)]
        for name in names
    ]
    heads = [f"{titles[metric]} {size.removeprefix('b')}" for metric, size in columns]
    return table(["ms", *heads], rows)


def serve_tables(report: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    """The levels of a sweep as columns, ours above the peer's at the same level."""
    theirs = {str(row["qps"]): row for row in peer["serve"]["rows"]}
    levels = [_level(row["qps"]) for row in report["rows"]]
    ours = dict(zip(levels, report["rows"], strict=True))
    rows: list[list[str]] = []
    for title, names in SERVE.items():
        for engine, known in (("jaxinfer", ours), (peer["peer"], theirs)):
            cells = [
                " / ".join(number(known[level][name]) for name in names)
                if level in known
                else NOTHING
                for level in levels
            ]
            rows.append([f"{title}, {engine}", *cells])
    return table(["requests a second", *levels], rows)


def _level(qps: float | str) -> str:
    return qps if isinstance(qps, str) else f"{qps:g}"


def kernel_tables(report: Mapping[str, Any]) -> list[str]:
    """A line for each case: the implementation that is fastest in it, then the others."""
    ceilings = report["ceilings"]
    moved = max(ceilings[name] for name in ("read", "rewritten", "copied"))
    measured: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        if "us" in row:
            measured.setdefault((row["op"], row["case"]), []).append(row)
    rows: list[list[str]] = []
    for (op, case), timed in measured.items():
        best, *others = sorted(timed, key=lambda row: row["us"])
        rows.append(
            [
                f"`{op}` {case}",
                best["impl"],
                *(number(best[name]) for name in ("us", "gb_per_s", "tflop_per_s")),
                f"{best['share']:.0%} of {best['bound']}",
                ", ".join(f"{row['impl']} {number(row['us'])}" for row in others) or NOTHING,
            ]
        )
    product = ceilings["product"] / 1e12
    heads = ["kernel, case", "by", "us", "GB/s", "TFLOP/s", "of its ceiling", "others, us"]
    return [
        f"{report['device']}, commit {report['git']}: ceilings {number(moved / 1e9)} GB/s, "
        f"{number(product)} TFLOP/s",
        "",
        *table(heads, rows),
    ]


def _value(values: Values, metric: str, case: str) -> str:
    return number(values[metric, case]["value"]) if (metric, case) in values else NOTHING


def number(value: float | None) -> str:
    """Three figures, or the whole number if it has more."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def tpot_plot(report: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    """TPOT by batch: floor, ours, peer; an SVG file."""

    def points(rows: Iterable[Mapping[str, Any]], field: str) -> dict[int, float]:
        return {
            int(row["case"][1:]): row[field]
            for row in rows
            if row["metric"] == "tpot_ms" and "/" not in row["case"] and row[field] is not None
        }

    lines = {
        peer["peer"]: points(peer["rows"], "value"),
        "jaxinfer": points(report["rows"], "value"),
        "floor": points(report["rows"], "floor"),
    }
    return lines_plot("TPOT, ms, by batch", {name: xy for name, xy in lines.items() if xy})


def sweep_of(folder: Path) -> dict[str, Any]:
    """A row for each level of a folder of ``jaxinfer bench serve --sweep``."""
    read = read_folder(folder)
    figures = results_of(read.run, read.records)["series"]
    rows = [
        {"qps": "inf" if one.rate is None else one.rate, **figures[one.name]}
        for one in read.run.series
    ]
    return {**read.environment, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """Print the tables; write the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--plot", type=Path, help="an SVG file of TPOT by batch")
    arguments = parser.parse_args(argv)
    peer = json.loads(arguments.peer.read_text())
    for path in arguments.results:
        report = sweep_of(path) if path.is_dir() else json.loads(path.read_text())
        rows = report.get("rows", [])
        if rows and "qps" in rows[0]:
            print("\n".join(serve_tables(report, peer)))
        elif rows and "groups" in report:
            print("\n".join(step_tables(report, peer)))
            if arguments.plot:
                arguments.plot.write_text(tpot_plot(report, peer))
        elif "ceilings" in report:
            print("\n".join(kernel_tables(report)))
        else:
            raise SystemExit(
                f"{path} is no result of bench.step, bench.kernels or jaxinfer bench serve"
            )


if __name__ == "__main__":
    main()
