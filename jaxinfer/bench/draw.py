"""``jaxinfer bench plot``: one figure of several runs against another, such as latency by load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxinfer.bench.arguments import Parser
from jaxinfer.bench.circumstances import writing
from jaxinfer.bench.folder import Read, read_folder, write_whole
from jaxinfer.bench.gates import figure_name
from jaxinfer.bench.plot import curves_plot
from jaxinfer.bench.records import COMPLETE
from jaxinfer.bench.results import Figures, results_of
from jaxinfer.core.errors import BenchError

RATE = "rate"  # requests a second offered; not a figure of the records


def parser() -> Parser:
    """The command line."""
    made = Parser("plot", (__doc__ or "").splitlines()[0])
    made.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    made.add_argument("--y", default="ttft_p50", help="a figure, as in a gate; default ttft_p50")
    made.add_argument("--x", default=RATE, help="rate, or a figure such as output_throughput")
    made.add_argument("--output", type=Path, default=Path("plot.svg"))
    return made


type Points = list[tuple[float, float]]


def curves_of(folders: Sequence[tuple[str, Read]], x: str, y: str) -> dict[str, Points]:
    """Points of each engine of each run, ordered by x; rounds of one load are points of their own.

    A folder's name is part of a curve's if there are several.
    """
    curves: dict[str, Points] = {}
    for name, read in folders:
        figures: Figures = results_of(read.run, read.records)["series"]
        for one in read.run.series:
            if one.state != COMPLETE:
                continue
            values = {RATE: one.rate, **figures[one.name]}
            across, up = values.get(x), values.get(y)
            if across is not None and up is not None:
                label = one.backend if len(folders) == 1 else f"{name} {one.backend}"
                curves.setdefault(label, []).append((float(across), float(up)))
    return {label: sorted(points) for label, points in curves.items()}


def main(arguments: list[str]) -> int:
    """Draw the curves; the exit code."""
    given = parser().parse_args(arguments)
    folders = [(path.name, read_folder(path)) for path in given.folders]
    x = given.x if given.x == RATE else figure_name(given.x)
    curves = curves_of(folders, x, figure_name(given.y))
    if not curves:
        raise BenchError(f"no series of these runs has both {given.x} and {given.y}; name others")
    with writing(given.output):
        write_whole(given.output, curves_plot(f"{given.y} by {given.x}", curves).encode())
    print(given.output)
    return 0
