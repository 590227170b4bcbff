"""The machine, versions and commit of a measurement, for its report."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def circumstances(*sources: str) -> dict[str, Any]:
    """Facts for a JSON report; ``git_dirty``: whether ``sources`` differ from the commit."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": len(jax.devices()),
        **host_circumstances(*sources),
    }


def host_circumstances(*sources: str) -> dict[str, Any]:
    """The facts without the device, for a process that must leave the device to another one."""
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
    """The output of git; None if the files are not a checkout."""
    command, root = ["git", *arguments], Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str | None:
    """The processor's name; None if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), None)
