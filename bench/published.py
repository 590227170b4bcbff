"""Speed ratios that other projects publish, next to ours: ``python -m bench.published FOLDER``.

    python -m bench.published FOLDER --page docs/benchmarks.md

writes the table into the page, between the comments ``BEGIN`` and ``END``.

FOLDER holds runs of the presets in ``configs/bench``, under the names that the file of published
ratios (``bench/results/peers/published.json``) gives them. A ratio says how many times as fast as
vLLM an engine is (of ``openinfer-offload``: how many times as fast a restored prompt is as a
computed one); ours have a column for each peer of the runs. Those of ours below 1, of any figure of
a run, come first. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.report import table
from jaxinfer.bench.results import is_worse
from jaxinfer.core.errors import BenchError

PUBLISHED = Path(__file__).parent / "results" / "peers" / "published.json"
WORDS: Mapping[str, str] = {
    "p50_ttft_ms": "TTFT p50",
    "p99_ttft_ms": "TTFT p99",
    "p50_tpot_ms": "TPOT p50",
    "output_throughput": "output tokens/s",
    "cold_over_host": "TTFT p50",
}

BEGIN, END = "<!-- published: made by bench.published -->", "<!-- end of published -->"

type Ours = tuple[float, tuple[float, float] | None]  # a ratio and its 95 % interval


PEERS: Mapping[str, str] = {"vllm": "vLLM", "sglang": "SGLang"}


def ours_of(folder: Path, point: Mapping[str, Any], figure: str, peer: str) -> Ours | None:
    """Our ratio to a peer of a published point's workload; None if no run has it."""
    rate = point["rate"]
    for path in sorted(folder.glob(f"{point['run']}*/result.json")):
        result = json.loads(path.read_text())
        for one in result.get("tiers", ()):
            if one["length"] == rate and figure in one and peer == "vllm":
                return one[figure], None
        for one in result.get("ratios", {}).values():
            is_same = one["peer"] == peer and (rate is None or one["rate"] == rate)
            if is_same and figure in one["figures"]:
                found = one["figures"][figure]
                return times_as_fast(figure, found["median"], found["interval"])
    return None


def below_one(folder: Path) -> list[str]:
    """A line for each figure of a run in which we are slower than a peer."""
    lines: list[str] = []
    for path in sorted(folder.glob("*/result.json")):
        for one in json.loads(path.read_text()).get("ratios", {}).values():
            rate = f", {one['rate']:g} requests a second" if one["rate"] is not None else ""
            for figure, found in one["figures"].items():
                ratio, interval = times_as_fast(figure, found["median"], found["interval"])
                if ratio < 1:
                    where = f"- {path.parent.name}{rate}: {figure}, next to {PEERS[one['peer']]}"
                    lines.append(f"{where}: {_shown(ratio, interval)}")
    return lines


def times_as_fast(figure: str, ratio: float, interval: Sequence[float] | None) -> Ours:
    """A ratio of two figures as a ratio of speeds."""
    if not is_worse(figure, 0.5):  # less is faster
        ratio, interval = 1 / ratio, interval and [1 / one for one in reversed(interval)]
    return ratio, (interval[0], interval[1]) if interval else None


def lines_of(folder: Path, published: Sequence[Mapping[str, Any]]) -> list[str]:
    """The list of our ratios below 1, and the table."""
    rows: list[list[str]] = []
    for group in published:
        points, figure = group["points"], group["figure"]
        cells = [
            [point["point"] for point in points],
            [f"{point['times_as_fast']:.2f}" for point in points],
        ]
        for peer in PEERS:
            found = [ours_of(folder, point, figure, peer) for point in points]
            cells.append(["–" if ours is None else f"{ours[0]:.2f}" for ours in found])
        what = f"{group['workload']}: {WORDS[figure]}"
        rows.append([what, group["source"], *(" / ".join(cell) for cell in cells)])
    heads = ["workload and figure", "published by", "at", "theirs"]
    heads += [f"here, {name}" for name in PEERS.values()]
    slower = below_one(folder)
    return [*(["Below 1 here:", "", *slower, ""] if slower else []), *table(heads, rows)]


def _shown(ratio: float, interval: tuple[float, float] | None) -> str:
    between = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{ratio:.2f}{between}"


def redraw(page: Path, lines: Sequence[str]) -> None:
    """Replace what a page has between ``BEGIN`` and ``END``; raises ``BenchError`` without them."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError(f"{page} has no place for the table; write {BEGIN} and {END} into it")
    page.write_text("\n".join([before + BEGIN, "", *lines, END + after]))


def main() -> None:
    """Print the Markdown, or write it into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", type=Path, help="write the table into it, between two comments")
    given = parser.parse_args()
    lines = lines_of(given.folder, json.loads(PUBLISHED.read_text()))
    if given.page is None:
        print("\n".join(lines))
    else:
        redraw(given.page, lines)


if __name__ == "__main__":
    main()
