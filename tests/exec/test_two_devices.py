"""On two devices weights and state are divided along their logical axes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TWO = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize(
    "families",
    [(), pytest.param(("gemma4", "qwen3_5_moe", "kimi_linear"), marks=pytest.mark.nightly)],
)
def test_two_devices(tmp_path: Path, families: tuple[str, ...]) -> None:
    """In a separate process, as the number of devices must be set before JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {TWO}"
    command = [sys.executable, "-m", "kit.two_devices", str(tmp_path), *families]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["checked"]), done.stderr
