"""The time of a token of a batch, some or all of whose rows have a JSON schema or a penalty.

Run from the repository root:

    .venv/bin/python -m bench.constrained [MODEL] [--rows 8 32] [--repeats 6] [--output FILE]

Each row has a prompt of 16 tokens and draws 64 more after the first, at temperature 1. The schema
asks for 60 lower-case words, so that a matcher has work at every token. The loads run in turns;
their wall and CPU time are in ms a token of the whole batch, without the prompts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

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


def timed(llm: LLM, rows: int, special: int, kind: str) -> np.ndarray:  # [2]
    """Wall and CPU ms a token of a batch, of which ``special`` rows are of this kind."""
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
        before = time.perf_counter(), time.process_time()
        llm.generate(prompts, sampling, use_tqdm=False)
        return np.array([time.perf_counter(), time.process_time()]) - before

    only_first = seconds(1)
    return 1e3 * (seconds(1 + TOKENS) - only_first) / TOKENS


def measured(llm: LLM, rows: int, repeats: int) -> list[dict[str, Any]]:
    """All loads of one batch size, in turns, after an untimed run of each."""
    loads = [("schema", 0), ("schema", rows // 4), ("schema", rows), ("penalty", rows)]
    for kind, special in loads:
        timed(llm, rows, special, kind)
    samples: dict[tuple[str, int], list[np.ndarray]] = {load: [] for load in loads}
    for _ in range(repeats):
        for kind, special in loads:
            samples[kind, special].append(timed(llm, rows, special, kind))
    results: list[dict[str, Any]] = []
    for (kind, special), found in samples.items():
        wall, cpu = np.round(np.transpose(found), 3).tolist()
        results.append(
            {
                "rows": rows,
                "kind": kind,
                "special_rows": special,
                "ms_per_token": median(wall),
                "cpu_ms_per_token": median(cpu),
                "load_1min": os.getloadavg()[0],
                "samples": {"ms_per_token": wall, "cpu_ms_per_token": cpu},
            }
        )
        shown = ("rows", "kind", "special_rows", "ms_per_token", "cpu_ms_per_token", "load_1min")
        print({name: results[-1][name] for name in shown}, flush=True)
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
