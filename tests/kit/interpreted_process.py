"""``interpreted``: what a module of ``kit`` finds out about Triton kernels in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def interpreted(module: str) -> Any:
    """Run ``python -m MODULE`` in Triton's interpreter; returns the JSON that it prints."""
    path = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    return json.loads(ended.stdout)
