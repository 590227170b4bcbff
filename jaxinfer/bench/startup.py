"""``jaxinfer bench startup``: time to the first token and memory: cold, warm, and with a bundle.

The cold runs start from an empty cache folder (download, conversion, compilation), the warm ones
use the cache that was filled, the last ones a bundle as well. Every run is a process of its own;
its memory is the figure that the system accounts to it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from jaxinfer.bench.arguments import Parser, add_output, count, settings_of
from jaxinfer.bench.folder import Folder, default_path, finished, now
from jaxinfer.bench.records import Record, Run, Series
from jaxinfer.bench.serve import conclude
from jaxinfer.bench.vllm_flags import STARTUP_REFUSED, add_told
from jaxinfer.core.errors import BenchError

PROMPT = "What is the capital of France?"
MODEL = "smollm2-135m-instruct"
# the settings of `generate` for a single prompt, so that a bundle holds the same three executables
SINGLE: Mapping[str, int] = MappingProxyType(
    {
        "max-num-seqs": 1,
        "max-num-batched-tokens": 256,
        "prefill-bucket-start": 256,
        "num-pages": 257,
    }
)
# the figures read from the report: a name, and the number after it
STATS: Mapping[str, str] = MappingProxyType(
    {
        "compile_or_load_s": r"^compile\s+([\d.]+) s",
        "weights_s": r"^load\s+([\d.]+) s",
        "first_token_s": r"^first token\s+([\d.]+) s",
        "late_compiles": r"^late compiles\s+(\d+)",
    }
)
COMMAND = (sys.executable, "-m", "jaxinfer")


def compile_bundle(model: str, cache_dir: str, folder: Path) -> dict[str, float]:
    """One process of ``jaxinfer compile``: its wall seconds, the bundle's bytes."""
    sizes = [f"--{name}={value}" for name, value in SINGLE.items()]
    command = [*COMMAND, "compile", model, *sizes, f"--cache-dir={cache_dir}"]
    start = time.perf_counter()
    done = subprocess.run([*command, f"--output={folder}"], capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"jaxinfer compile failed: {_last_line(done.stderr)}")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"wall_s": time.perf_counter() - start, "size_bytes": float(size)}


def run_once(model: str, cache_dir: str, flags: Sequence[str] = ()) -> dict[str, float]:
    """One process: its own report, its wall seconds, its peak resident bytes."""
    command = [*COMMAND, "generate", "--stats", "--temperature=0", f"--model={model}", *flags]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, f"--cache-dir={cache_dir}", PROMPT],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        report = process.stderr.read()
        # instead of process.wait(): it returns the memory
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:  # the run is ended
        process.kill()
        process.communicate()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchError(f"jaxinfer generate failed: {_last_line(report)}")
    row = {"wall_s": time.perf_counter() - start, "peak_rss_bytes": usage.ru_maxrss * 1024.0}
    for name, pattern in STATS.items():
        match = re.search(pattern, report, re.MULTILINE)
        if match is None:
            raise BenchError(f"`generate --stats` does not report {name}: {_last_line(report)}")
        row[name] = float(match[1])
    return row


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it wrote no message"


def measure(folder: Folder, model: str, num_cold: int, num_warm: int) -> None:
    """Run all processes, and add a series of each kind."""
    rows: dict[str, list[Record]] = {"cold": [], "compile": [], "warm": [], "bundle": []}
    with tempfile.TemporaryDirectory() as root:
        for number in range(num_cold):
            cache_dir = f"{root}/{number}"
            rows["cold"].append(Record(values=run_once(model, cache_dir)))
        bundle = Path(root) / "bundle"
        rows["compile"].append(Record(values=compile_bundle(model, cache_dir, bundle)))
        flags: dict[str, list[str]] = {"warm": [], "bundle": [f"--bundle={bundle}"]}
        for _ in range(num_warm):  # alternating: other load of the machine affects both
            for case, more in flags.items():
                rows[case].append(Record(values=run_once(model, cache_dir, more)))
    for case, records in rows.items():
        folder.add(Series(name=case, requests=len(records)), records)


def main(arguments: list[str]) -> int:
    """Measure, print, write; the exit code."""
    parser = Parser("startup", (__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--num-iters-cold", type=count, default=1)
    parser.add_argument("--num-iters-warm", type=count, default=5)
    add_told(parser, (), STARTUP_REFUSED)
    add_output(parser)
    given = parser.parse_args(arguments)
    run = Run(
        command="startup", created=now(), settings=settings_of(given), gates=given.gate, metrics=()
    )
    folder = Folder.create(given.output or default_path("startup"), run)
    with finished(folder):
        measure(folder, given.model, given.num_iters_cold, given.num_iters_warm)
    result = folder.finish()
    for case, figures in result["series"].items():
        for name, value in figures.items():
            print(f"{case:8} {name:18} {value:16.2f}")
    return conclude(folder, result)
