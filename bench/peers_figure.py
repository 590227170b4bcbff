"""The figure of README.md: TPOT of jaxinfer, vLLM and SGLang.

python -m bench.peers_figure bench/results/peers/h100_qwen3_4b.json docs/peers.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from jaxinfer.bench.plot import bars_plot

TITLE = "Time per output token, ms: Qwen3-4B, bfloat16, prompts of 1,024 tokens, one H100"


def figure(report: dict[str, Any]) -> str:
    """An SVG file."""
    engines = {one["engine"]: one["tpot_ms"] for one in report["engines"]}
    first = next(iter(engines.values()))
    groups = {
        f"{rows} row" + "s" * (rows != "1"): {name: tpot[rows] for name, tpot in engines.items()}
        for rows in first
    }
    return bars_plot(TITLE, groups)


def main() -> None:
    """Read the report named first, and write the file named second."""
    report, plot = map(Path, sys.argv[1:])
    plot.write_text(figure(json.loads(report.read_text())))


if __name__ == "__main__":
    main()
