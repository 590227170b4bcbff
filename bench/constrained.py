"""The time of a token of a batch, some or all of whose rows have a JSON schema or a penalty.

Run from the repository root:

    .venv/bin/python -m bench.constrained [MODEL] [--rows 8 32] [--repeats 6] [--output FILE]

Each row has a prompt of 16 tokens and draws 64 more after the first, at temperature 1. The schema
asks for 60 lower-case words, so that a matcher has work at every token. The loads run in turns, and
again if other processes have used more than a tenth of a core; wall and CPU time are in ms a token
of the whole batch, without the prompts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.circumstances import host_circumstances, write_report
from jaxinfer import LLM, SamplingParams
from jaxinfer.core.config import DEFAULT_MODEL

WORDS = {
    "type": "array",
    "items": {"type": "string", "pattern": "^[a-z]{3,9}$"},
    "minItems": 60,
    "maxItems": 80,
}
SCHEMA = {
    "type": "object",
    "properties": {"tags": WORDS},
    "required": ["tags"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "penalty": {"presence_penalty": 0.5},
}
TOKENS = 64  # after the first
QUIET = 0.1  # cores that other processes may use during a sample
TRIES = 10  # for each sample; then the quietest ones count


class Sample(NamedTuple):
    """Times of a batch, and the number of cores that other processes used in that time."""

    ms_per_token: float
    cpu_ms_per_token: float
    others: float


def clocks() -> np.ndarray:  # [3]
    """Seconds: wall, CPU of this process, CPU of all processes (Linux)."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    ticks = user + nice + system + irq + softirq
    return np.array([time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK")])


def timed(llm: LLM, rows: int, special: int, kind: str) -> Sample:
    """One batch, of which ``special`` rows are of this kind."""
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * row) % 5000 + 100 for i in range(16)]}
        for row in range(rows)
    ]

    def seconds(max_tokens: int) -> np.ndarray:
        sampling = [
            SamplingParams(
                temperature=1.0,
                seed=row,
                max_tokens=max_tokens,
                ignore_eos=True,
                **(KINDS[kind] if row < special else {}),
            )
            for row in range(rows)
        ]
        before = clocks()
        llm.generate(prompts, sampling, use_tqdm=False)
        return clocks() - before

    first, all_tokens = seconds(1), seconds(1 + TOKENS)
    wall, own, machine = (1e3 * (all_tokens - first) / TOKENS).tolist()
    return Sample(wall, own, (machine - own) / wall)


def measured(llm: LLM, rows: int, repeats: int) -> list[dict[str, Any]]:
    """All loads of one batch size, in turns, after an untimed run of each."""
    loads = [("schema", 0), ("schema", rows // 4), ("schema", rows), ("penalty", rows)]
    for kind, special in loads:
        timed(llm, rows, special, kind)
    found: dict[tuple[str, int], list[Sample]] = {load: [] for load in loads}
    for _ in range(TRIES * repeats):
        for (kind, special), samples in found.items():
            if sum(one.others < QUIET for one in samples) < repeats:
                samples.append(timed(llm, rows, special, kind))
    results: list[dict[str, Any]] = []
    for (kind, special), samples in found.items():
        quietest = sorted(samples, key=lambda one: one.others)[:repeats]
        columns = Sample(*np.round(np.transpose(quietest), 3).tolist())._asdict()
        medians = {name: round(median(values), 3) for name, values in columns.items()}
        medians["least_ms_per_token"] = min(columns["ms_per_token"])
        load = {"rows": rows, "kind": kind, "special_rows": special}
        print({**load, **medians}, flush=True)
        results.append({**load, **medians, "samples": columns})
    return results


def main() -> None:
    """Measure each batch size and write the report."""
    parser = argparse.ArgumentParser(description="ms a token of a batch with constrained rows")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = host_circumstances("jaxinfer", "pallas_kernels")
    llm = LLM(options.model, max_num_seqs=max(options.rows))
    report["results"] = [
        result for rows in options.rows for result in measured(llm, rows, options.repeats)
    ]
    if options.output:
        write_report(options.output, report)


if __name__ == "__main__":
    main()
