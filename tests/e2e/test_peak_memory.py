"""The memory that a single prompt takes: the file and 500 MB, or 2.5 times dequantised weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE, DEQUANTISED = 98e6, 538e6  # bytes of SmolLM2's file, and of its weights in float32
COMMAND = "from jaxinfer.cli.main import main; main()"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("weights", "most"), [("quantised", FILE + 500e6), ("float32", 2.5 * DEQUANTISED)]
)
def test_first_run_and_later_ones(weights: str, most: float, tmp_path: Path) -> None:
    """The first run compiles (and dequantises), the second loads both from the cache."""
    flags = ["--stats", "--max-tokens=8", f"--cpu-weights={weights}"]
    command = [sys.executable, "-c", COMMAND, "generate", *flags, "Hello"]
    environment = {**os.environ, "JAXINFER_CACHE_DIR": os.fspath(tmp_path)}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        shown = re.search(r"peak RSS +([\d.]+) (MB|GB)", done.stderr)
        assert shown, done.stderr
        assert float(shown[1]) * {"MB": 1e6, "GB": 1e9}[shown[2]] <= most
