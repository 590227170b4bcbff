"""Time to the first token and memory of `jaxinfer generate`: cold, warm, and with a bundle.

Run from the repository root:

    .venv/bin/python -m bench.startup [--runs N] [--output FILE]

The first run starts from an empty cache folder (download, conversion, compilation), the warm ones
use the cache that it filled, the last ones a bundle as well. Every run is a process of its own; its
memory is the figure that the system accounts to it.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.circumstances import circumstances, write_report

PROMPT = "What is the capital of France?"
MODEL = "smollm2-135m-instruct"
# the settings of `generate` for a single prompt, so that a bundle holds the same three executables
SINGLE = {"max-num-seqs": 1, "max-num-batched-tokens": 256, "prefill-bucket-start": 256}
SINGLE_PAGES = 257
# the figures read from the report: a name, and the number after it
STATS = {
    "compile_or_load_s": r"^compile\s+([\d.]+) s",
    "weights_s": r"^load\s+([\d.]+) s",
    "first_token_s": r"^first token\s+([\d.]+) s",
    "late_compiles": r"^late compiles\s+(\d+)",
}


SCRIPT = Path(sys.executable).with_name("jaxinfer")


def compile_bundle(cache_dir: str, folder: Path) -> dict[str, float]:
    """One process of ``jaxinfer compile``: its wall seconds, the bundle's bytes."""
    sizes = [f"--{name}={value}" for name, value in {**SINGLE, "num-pages": SINGLE_PAGES}.items()]
    command = [SCRIPT, "compile", MODEL, *sizes, f"--cache-dir={cache_dir}", f"--output={folder}"]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"wall_s": time.perf_counter() - start, "size_bytes": float(size)}


def run_once(cache_dir: str, *flags: str) -> dict[str, float]:
    """One process: its own report, its wall seconds, its peak resident bytes."""
    command = [SCRIPT, "generate", "--stats", "--temperature=0", f"--model={MODEL}", *flags]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"--cache-dir={cache_dir}", PROMPT],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    report = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)  # instead of process.wait(): it returns the memory
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
        folder = Path(cache_dir) / "bundle"
        compiled = [compile_bundle(cache_dir, folder)]
        flags: dict[str, list[str]] = {"warm": [], "bundle": [f"--bundle={folder}"]}
        runs: dict[str, list[dict[str, float]]] = {"warm": [], "bundle": []}
        for _ in range(arguments.runs):  # in turns: other load of the machine affects both
            for case, more in flags.items():
                runs[case].append(run_once(cache_dir, *more))
    rows = rows_of("cold", cold) + rows_of("compile", compiled)
    rows += rows_of("warm", runs["warm"]) + rows_of("bundle", runs["bundle"])
    for row in rows:
        print(f"{row['case']:8} {row['metric']:18} {row['value']:16.2f}")
    write_report(arguments.output, {**facts, "rows": rows})


if __name__ == "__main__":
    main()
