"""The time from a process's start to an engine's first token, without and with a bundle.

Owns: the child process (this file as a module) and its parent. Every start is a process of its own
with an empty compile cache, or with the bundles that the first one saved. The parent must not have
a device yet: on a GPU it would hold the memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.step.file import run_child

type Start = dict[str, float]  # seconds since the process began, bytes


def measure_starts(settings: Mapping[str, Any], runs: int) -> dict[str, list[Start]]:
    """Starts by case: ``no_bundle`` once, ``bundle`` ``runs`` times."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**settings, "cache_dir": folder}
        cold = start_once(settings, Path(folder))  # it saves its executables there
        warm = [start_once(settings, Path(folder)) for _ in range(runs)]
    return {"no_bundle": [cold], "bundle": warm}


def start_once(settings: Mapping[str, Any], folder: Path) -> Start:
    """One process; compilers' own caches are in ``folder`` too, so that none is warm."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": os.fspath(folder / "triton"),
        "CUDA_CACHE_PATH": os.fspath(folder / "cuda"),
    }
    return run_child("bench.step.start", json.dumps(settings), environment=environment)


def start_rows(starts: Mapping[str, list[Start]]) -> list[dict[str, Any]]:
    """Rows by metric and case. ``start_s`` is the time until ready for a request."""
    return [
        {"metric": metric, "case": case, "value": round(median(samples), 3), "samples": samples}
        for case, runs in starts.items()
        for metric in runs[0]
        for samples in [[round(run[metric], 3) for run in runs]]
    ]


def main() -> None:
    """The child: build an engine, answer one prompt, report as one line of JSON."""
    settings = json.loads(sys.argv[1])
    from jaxinfer import LLM, SamplingParams
    from jaxinfer.cli.stats import peak_rss_bytes, process_age

    imported = process_age()
    llm = LLM(**settings)
    ready = process_age()
    begin = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    first = time.perf_counter() - begin
    stats = llm.stats()
    report = {
        "start_s": ready,
        "start_import_s": imported,
        "start_compile_or_load_s": stats.compile_seconds,
        "start_weights_s": stats.load_seconds,
        "start_first_token_s": ready + first,
        "start_executables": stats.num_executables,
        "start_compiled": stats.num_compiled,
        "start_peak_rss_mb": peak_rss_bytes() / 1e6,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
