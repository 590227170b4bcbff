"""What a GPU's allocator may take is said before JAX starts its backend, and only once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SHARE, OLD_SHARE, PREALLOCATE = NAMES = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# Changing the number of CPU devices raises once a backend has started.
PROGRAM = f"""
import json, os, jax
from jaxinfer import EngineConfig
from jaxinfer.engine import build

def check_device():
    jax.config.update("jax_num_cpu_devices", 1)
    print(json.dumps({{name: os.environ.get(name) for name in {NAMES!r}}}))
    raise SystemExit

build.check_device = check_device
build.plan_engine(EngineConfig(gpu_memory_utilization=0.5))
"""


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, ["0.5", None, "false"]),
        ({SHARE: "0.3"}, ["0.3", None, "false"]),
        ({OLD_SHARE: "0.3"}, [None, "0.3", "false"]),
        ({PREALLOCATE: "true"}, ["0.5", None, "true"]),
    ],
    ids=["open", "share", "old_share", "preallocate"],
)
def test_variables_are_set_before_the_backend_starts(
    user: dict[str, str], expected: list[str | None]
) -> None:
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**others, **user}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout).values()) == expected
