"""``report.html``: the report with plots, in one file without scripts or links.

Plots are SVG text of the records, so `verify` draws the same page again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jaxinfer.bench.figures import METRICS, is_answered, samples
from jaxinfer.bench.numbers import percentile
from jaxinfer.bench.plot import curves_plot
from jaxinfer.bench.records import MISSING, Record, Run
from jaxinfer.bench.report import report_text

PERCENTS = (0, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
STYLE = (
    "body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{max-width:44em;display:block}"
)


def page_text(
    run: Run,
    environment: Mapping[str, Any],
    result: Mapping[str, Any],
    records: Mapping[str, Sequence[Record]],
) -> str:
    """The whole page."""
    body = "\n".join(_html(report_text(run, environment, result).splitlines()))
    drawn = "\n".join(_plots(run, result, records))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>jaxinfer bench {escape(run.command)}</title><style>{STYLE}</style></head><body>\n"
        f"{body}\n<h2>Plots</h2>\n{drawn}\n</body></html>\n"
    )


def _html(lines: Sequence[str]) -> Iterator[str]:
    """Headings, lists, tables and paragraphs of the report's own Markdown."""
    inside = ""
    for line in lines:
        kind = "table" if line.startswith("|") else "ul" if line.startswith("- ") else ""
        if kind != inside:
            if inside:
                yield f"</{inside}>"
            if kind:
                yield f"<{kind}>"
        inside = kind
        if kind == "table":
            cells = line.strip("| ").split(" | ")
            if not cells[0].startswith("---"):
                yield f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in cells)}</tr>"
        elif kind == "ul":
            yield f"<li>{_inline(line[2:])}</li>"
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            yield f"<h{level}>{_inline(line[level + 1 :])}</h{level}>"
        elif line:
            yield f"<p>{_inline(line)}</p>"
    if inside:
        yield f"</{inside}>"


def _inline(text: str) -> str:
    """Escaped text with the report's bold and code spans."""
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)


def _plots(
    run: Run, result: Mapping[str, Any], records: Mapping[str, Sequence[Record]]
) -> Iterator[str]:
    """Each metric's distribution in every series, and its percentiles by rate."""
    shown = [one for one in run.series if one.state != MISSING]
    rates = sorted({one.rate for one in shown if one.rate is not None})
    for metric in run.metrics:
        if len(rates) > 1:
            lines = {
                f"p{percent:g}": [
                    (one.rate, result["series"][one.name][f"p{percent:g}_{metric}_ms"])
                    for one in sorted(shown, key=lambda one: one.rate or 0)
                    if one.rate is not None
                    and f"p{percent:g}_{metric}_ms" in result["series"][one.name]
                ]
                for percent in run.percentiles
            }
            yield curves_plot(f"{METRICS[metric]}, ms, by requests a second", lines)
        spread = {
            one.name: [(float(percent), percentile(values, percent)) for percent in PERCENTS]
            for one in shown
            if (values := _samples(records[one.name]).get(metric))
        }
        if spread:
            yield curves_plot(f"{METRICS[metric]}, ms, by percentile", spread)


def _samples(records: Sequence[Record]) -> dict[str, list[float]]:
    return samples([record for record in records if is_answered(record)])
