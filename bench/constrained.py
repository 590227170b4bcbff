"""The time of a token of a batch, some or all of whose rows have a JSON schema or a penalty.

Run from the repository root:

    .venv/bin/python -m bench.constrained [MODEL] [--rows 8 32] [--repeats 6] [--output FILE]
        [--kinds words penalty] [--prompt 16] [--tokens 64] [--quiet 0.1]
        [--engine load_format=dummy]

Each row has a prompt and draws so many tokens after the first, at temperature 1. Of the schemas,
``integers`` is an array of integers, with another length for each row; ``words`` asks for 60
lower-case words, ``objects`` for objects with strings, and ``strings`` for objects with strings of
bounded length, whose masks take llguidance five times as long. The loads run in turns, and again
if other processes have used more than ``quiet`` cores; times are in ms a token of the whole
batch: that from the last row's first token to the last token, and CPU time without that of a batch
of one token.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from bench.step.__main__ import setting
from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.circumstances import host_circumstances, write_report
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
NAMES = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TRIES = 10  # for each sample; then the quietest ones count


class Sizes(NamedTuple):
    """The loads of a report."""

    kinds: list[str]  # beside one without special rows
    prompt: int  # tokens
    tokens: int  # after the first
    quiet: float  # cores that other processes may use during a sample


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


def special_settings(kind: str, row: int) -> dict[str, Any]:
    """The settings of a row of this kind."""
    integers = {"type": "array", "items": {"type": "integer"}, "minItems": 3000 + row}
    schemas: dict[str, dict[str, Any]] = {
        "integers": integers,
        "words": SCHEMA,
        "objects": {"type": "array", "items": OBJECT, "minItems": 100 + row},
        "strings": {"type": "array", "items": NAMES, "minItems": 100 + row},
    }
    if kind == "penalty":
        return {"presence_penalty": 0.5}
    return {"structured_outputs": {"json": schemas[kind]}}


def timed(llm: LLM, sizes: Sizes, rows: int, special: int, kind: str) -> Sample:
    """One batch, of which ``special`` rows are of this kind."""
    prompts = [
        {"prompt_token_ids": [(7 * i + 13 * row) % 5000 + 100 for i in range(sizes.prompt)]}
        for row in range(rows)
    ]

    def run(max_tokens: int) -> tuple[float, np.ndarray]:
        """Seconds from the last first token to the last one, and the clocks of the whole batch."""
        sampling = [
            SamplingParams(
                temperature=1.0,
                seed=row,
                max_tokens=max_tokens,
                ignore_eos=True,
                **(special_settings(kind, row) if row < special else {}),
            )
            for row in range(rows)
        ]
        before = clocks()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        used, times = clocks() - before, [output.outputs[0].times for output in outputs]
        firsts = [one.first_token for one in times if one is not None]
        return max(one.finished for one in times if one is not None) - max(firsts), used

    run(1)  # compiles schemas that the cache of grammars has dropped
    (_, first), (seconds, all_tokens) = run(1), run(1 + sizes.tokens)
    wall, own, machine = (1e3 * (all_tokens - first) / sizes.tokens).tolist()
    return Sample(1e3 * seconds / sizes.tokens, own, (machine - own) / wall)


def measured(llm: LLM, sizes: Sizes, rows: int, repeats: int) -> list[dict[str, Any]]:
    """All loads of one batch size, in turns, after an untimed run of each."""
    loads = [("none", 0)]
    loads += [(kind, special) for kind in sizes.kinds for special in (rows // 4, rows)]
    for kind, special in loads:
        timed(llm, sizes, rows, special, kind)
    found: dict[tuple[str, int], list[Sample]] = {load: [] for load in loads}
    for _ in range(TRIES * repeats):
        for (kind, special), samples in found.items():
            if sum(one.others < sizes.quiet for one in samples) < repeats:
                samples.append(timed(llm, sizes, rows, special, kind))
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
    parser.add_argument("--kinds", nargs="+", default=["words", "penalty"])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quiet", type=float, default=0.1, metavar="CORES")
    parser.add_argument(
        "--engine", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="a setting of the engine, such as load_format=dummy",
    )  # fmt: skip
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = host_circumstances("jaxinfer", "pallas_kernels")
    llm = LLM(options.model, max_num_seqs=max(options.rows), **dict(options.engine))
    sizes = Sizes(options.kinds, options.prompt, options.tokens, options.quiet)
    report["sizes"] = sizes._asdict()
    report["results"] = [
        result for rows in options.rows for result in measured(llm, sizes, rows, options.repeats)
    ]
    if options.output:
        write_report(options.output, report)


if __name__ == "__main__":
    main()
