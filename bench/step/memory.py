"""The share of a card's memory that an engine takes, when ready and with all pages in use.

Owns: the child process (this file as a module) and its parent. The engine has a process of its own,
since JAX's allocator keeps the memory of earlier engines. The figures come from the card's driver,
not from JAX: it also counts CUDA's own memory and the executables' code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from shutil import which
from threading import Thread
from typing import Any

from bench.step.file import run_child

SMI = "nvidia-smi"
EVERY_MS = 50
TOKENS_OUT = 64  # so that all sequences decode together


class Card:
    """Memory in use of the first card, in MiB, at each report of the driver's tool."""

    def __init__(self, lines: Any) -> None:  # of text: used, total
        self._lines = iter(lines)
        self.total = self.used = self.peak = 0
        self._read(next(self._lines))
        self._thread = Thread(target=self._follow, daemon=True)
        self._thread.start()

    def taken_peak(self) -> int:
        """The maximum since the last call, and at that moment; the maximum then restarts."""
        peak, self.peak = self.peak, self.used
        return peak

    def _follow(self) -> None:
        for line in self._lines:
            self._read(line)

    def _read(self, line: str) -> None:
        self.used, self.total = map(int, line.split(","))
        self.peak = max(self.peak, self.used)


@contextmanager
def watched() -> Generator[Card]:
    """The first card, watched by a process of the driver's tool."""
    asked = ["--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    command = [SMI, *asked, f"--loop-ms={EVERY_MS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Card(process.stdout)
        finally:
            process.kill()


def measure_memory(settings: Mapping[str, Any], sequences: int) -> list[dict[str, Any]] | None:
    """Rows ``card_share``: ``until_ready``, and ``full``, with sequences that fill all pages.

    Memory that other processes had before is not counted. None if there is no card.
    """
    if which(SMI) is None:
        return None
    with watched() as card:
        before = card.taken_peak()
    said = run_child("bench.step.memory", json.dumps(settings), str(sequences))
    total = said.pop("total_mib")
    return [
        {
            "metric": "card_share",
            "case": case,
            "value": round((used - before) / total, 4),
            "used_mib": used - before,
            "total_mib": total,
            **said,
        }
        for case, used in said.pop("used_mib").items()
    ]


def main() -> None:
    """The child: build an engine, fill its pages, report as one line of JSON."""
    settings, sequences = json.loads(sys.argv[1]), int(sys.argv[2])
    import numpy as np

    from jaxinfer import LLM, SamplingParams
    from jaxinfer.core.config import DEFAULT_GPU_MEMORY_UTILIZATION, DEFAULT_PAGE_SIZE

    with watched() as card:
        llm = LLM(**settings)
        used = {"until_ready": card.taken_peak()}
        stats = llm.stats()
        pages = (stats.num_fresh_pages + stats.num_cached_pages) // sequences
        tokens = pages * settings.get("page_size", DEFAULT_PAGE_SIZE)
        drawn = np.random.default_rng(0).integers(64, size=(sequences, tokens - TOKENS_OUT))
        params = SamplingParams(max_tokens=TOKENS_OUT, temperature=1.0, ignore_eos=True)
        answers = llm.generate(drawn.tolist(), params, use_tqdm=False)
        used["full"] = card.taken_peak()
    report = {
        "used_mib": used,
        "total_mib": card.total,
        "asked": settings.get("gpu_memory_utilization", DEFAULT_GPU_MEMORY_UTILIZATION),
        "sequences": sequences,
        "tokens": tokens,
        "answered": sum(len(each.outputs[0].token_ids) == TOKENS_OUT for each in answers),
        "preempted": llm.stats().num_preemptions,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
