"""The machine, versions and commit of a measurement, and its report as a JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxinfer.core.errors import BenchError

PACKAGES = (
    "jaxinfer",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
)


def host_circumstances(*sources: str) -> dict[str, Any]:
    """Machine, versions and commit; ``git_dirty``: whether ``sources`` differ from the commit.

    It leaves the device to other processes.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        "host": _cpu_model() or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), **_versions()},
        "git": commit,
        "git_dirty": commit and bool(_git("status", "--porcelain", *sources)),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write all or nothing: if the process is killed, an earlier report stays complete.

    Raises ``BenchError`` if it cannot be written.
    """
    partial = path.with_suffix(".partial")
    with writing(path):
        partial.write_text(json.dumps(report, indent=1) + "\n")
        partial.replace(path)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Make the folder of a file that is written within; ``OSError`` becomes ``BenchError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise BenchError(
            f"{path} cannot be written ({error.strerror}); name another file"
        ) from error


def _versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git(*arguments: str) -> str | None:
    """The output of git; None if the files are no checkout of this repository."""
    command, root = ["git", *arguments], Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed, perhaps within a repository of the user
        return None
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
