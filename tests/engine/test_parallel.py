"""On several devices an engine answers as on one, and each device holds its own part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.parallel import CHECKS

TOGETHER = ("loading", "refusals", "experts", "features", "bundles", "sums", "graphs")


def run(folder: Path, *checks: str) -> None:
    """In a separate process, as the number of devices must be set before JAX starts."""
    command = [sys.executable, "-m", "kit.parallel", str(folder), *checks]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["checked"]), done.stderr


def test_several_devices(tmp_path: Path) -> None:
    run(tmp_path, *TOGETHER)


@pytest.mark.nightly
@pytest.mark.parametrize("check", [name for name in CHECKS if name not in TOGETHER])
def test_several_devices_nightly(tmp_path: Path, check: str) -> None:
    run(tmp_path, check)
