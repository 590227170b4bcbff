"""The JSON file of ``bench.step``, which several calls fill, each with its groups of rows.

Owns: the circumstances of a run, and the merging of a later call's rows with earlier ones.
Other benchmarks use them too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.circumstances import circumstances

SOURCES = ("jaxinfer", "pallas_kernels", "configs", "bench")
ENVIRONMENT = (
    "XLA_",
    "JAX_",
    "NVIDIA_TF32",
)  # prefixes of variables that affect the measurement

type Row = dict[str, Any]  # metric, case, value, floor if known, samples; and group


def facts(commit: str | None) -> dict[str, Any]:
    """The machine, the versions and the commit: ``commit`` if it is given, else git's."""
    found = circumstances(*SOURCES)
    if commit is not None:
        found |= {"git": commit, "git_dirty": None}
    return found


def environment() -> dict[str, str]:
    """The variables of this process that jax and XLA read."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(ENVIRONMENT)}


def read_report(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The report so far, or one without rows.

    Raises ``SystemExit`` if the file is of another machine, commit or model.
    """
    if not path.exists():
        return {**about, "groups": {}, "rows": []}
    old = json.loads(path.read_text())
    for name, here in about.items():
        if old.get(name) != here:
            raise SystemExit(
                f"{path} was measured with {name} {old.get(name)}, and here it is {here}; "
                "give another --output"
            )
    return old


def merged_report(
    old: Mapping[str, Any], group: str, note: Mapping[str, Any], rows: Iterable[Row]
) -> dict[str, Any]:
    """The report with a group's rows in place of earlier ones of the same metric and case.

    ``note`` holds the fields that only this group's rows share.
    """
    added = [{"group": group, **row} for row in rows]
    replaced = {(row["metric"], row["case"]) for row in added}
    kept = [row for row in old["rows"] if (row["metric"], row["case"]) not in replaced]
    return {**old, "groups": {**old["groups"], group: note}, "rows": [*kept, *added]}


def run_child(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a module of the benchmark in a process; returns the last line that it prints, as JSON."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
