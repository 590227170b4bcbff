"""How long `jaxinfer generate` takes to its first token, and how much memory: cold and warm caches.

Run from the repository root:

    .venv/bin/python -m bench.startup [--runs N] [--output FILE]

The first run starts from an empty cache folder (download, conversion, compilation), the others from
what it left. Every run is a process of its own; its memory is what the system accounted to it.
Must not know: the engine; it reads what `--stats` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.circumstances import circumstances

PROMPT = "What is the capital of France?"
# what is read of the report: a name, and the number after it
STATS = {
    "compile_or_load_s": r"^compile\s+([\d.]+) s",
    "weights_s": r"^load\s+([\d.]+) s",
    "first_token_s": r"^first token\s+([\d.]+) s",
    "late_compiles": r"^late compiles\s+(\d+)",
}


def run_once(cache_dir: str) -> dict[str, float]:
    """One process: its own report, its wall seconds, its peak resident bytes."""
    script = Path(sys.executable).with_name("jaxinfer")
    command = [script, "generate", "--stats", "--temperature=0"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"--cache-dir={cache_dir}", PROMPT],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    report = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)  # instead of process.wait(): tells the memory
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"jaxinfer generate failed: {report}")
    row = {"wall_s": time.perf_counter() - start, "peak_rss_bytes": usage.ru_maxrss * 1024.0}
    for name, pattern in STATS.items():
        match = re.search(pattern, report, re.MULTILINE)
        if match is None:
            raise SystemExit(f"`--stats` no longer reports {name}: {report}")
        row[name] = float(match[1])
    return row


def rows_of(case: str, runs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One row for each metric: the median, and every sample."""
    rows: list[dict[str, Any]] = []
    for metric in runs[0]:
        samples = [run[metric] for run in runs]
        median = statistics.median(samples)
        rows.append({"metric": metric, "case": case, "value": median, "samples": samples})
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs with warm caches")
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/startup.json"))
    arguments = parser.parse_args()
    facts = circumstances()
    with tempfile.TemporaryDirectory() as cache_dir:
        cold = [run_once(cache_dir)]
        warm = [run_once(cache_dir) for _ in range(arguments.runs)]
    rows = rows_of("cold", cold) + rows_of("warm", warm)
    for row in rows:
        print(f"{row['case']:5} {row['metric']:18} {row['value']:16.2f}")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
