"""What a run says of its process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from jaxinfer.cli.stats import peak_rss_bytes

LARGE = 400_000_000  # bytes
PROGRAM = "from jaxinfer.cli.stats import peak_rss_bytes; print(peak_rss_bytes())"


def test_the_peak_is_the_processs_own_not_that_of_whoever_started_it() -> None:
    held = np.ones(LARGE, np.uint8)
    child = int(subprocess.check_output([sys.executable, "-c", PROGRAM]))
    assert child < held.nbytes < peak_rss_bytes()
