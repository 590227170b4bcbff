"""The memory that a single prompt takes: at most 2.5 times SmolLM2's weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WEIGHTS = 538e6  # bytes, in float32
COMMAND = "from jaxinfer.cli.main import main; main()"


@pytest.mark.nightly
def test_first_run_and_later_ones(tmp_path: Path) -> None:
    """The first run compiles and dequantises, the second loads both from the cache."""
    command = [sys.executable, "-c", COMMAND, "generate", "--stats", "--max-tokens=8", "Hello"]
    environment = {**os.environ, "JAXINFER_CACHE_DIR": os.fspath(tmp_path)}
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        shown = re.search(r"peak RSS +([\d.]+) GB", done.stderr)
        assert shown, done.stderr
        assert float(shown[1]) * 1e9 <= 2.5 * WEIGHTS
