"""The process's figures in the report of a run."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from jaxinfer.cli.stats import peak_rss_bytes

LARGE = 400_000_000  # bytes
PROGRAM = "from jaxinfer.cli.stats import peak_rss_bytes; print(peak_rss_bytes())"


def test_the_peak_is_the_processs_own_not_its_parents() -> None:
    held = np.ones(LARGE, np.uint8)
    child = int(subprocess.check_output([sys.executable, "-c", PROGRAM]))
    assert child < held.nbytes < peak_rss_bytes()
