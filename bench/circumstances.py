"""What a measured number means nothing without: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def circumstances(*sources: str) -> dict[str, Any]:
    """Facts for a JSON report; ``git_dirty`` says whether ``sources`` differ from the commit."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": len(jax.devices()),
        **host_circumstances(*sources),
    }


def host_circumstances(*sources: str) -> dict[str, Any]:
    """The same without the device: for a process that must leave it to another one."""
    commit = _git("rev-parse", "HEAD")
    return {
        "host": _cpu_model() or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "git": commit,
        "git_dirty": commit and bool(_git("status", "--porcelain", *sources)),
    }


def _git(*arguments: str) -> str | None:
    """What git says; None where the files are no checkout, as on a lent machine."""
    command, root = ["git", *arguments], Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str | None:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), None)
