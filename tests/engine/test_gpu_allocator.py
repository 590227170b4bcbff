"""Variables for JAX's GPU allocator, Triton and XLA are set before the backend starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jaxinfer.core.config import allocator_share

KIND, SHARE, OLD_SHARE, PREALLOCATE, NO_LINE_INFO, XLA_LOG = NAMES = (
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "TRITON_DISABLE_LINE_INFO",
    "TF_CPP_MIN_LOG_LEVEL",
)
# jax_num_cpu_devices cannot be changed once a backend has started: then the program fails
PROGRAM = f"""
import json, os, jax
from jaxinfer import EngineConfig
from jaxinfer.engine.start import build

def check_device(_):
    jax.config.update("jax_num_cpu_devices", 1)
    print(json.dumps({{name: os.environ.get(name) for name in {NAMES!r}}}))
    raise SystemExit

build.check_device = check_device
build.plan_engine(EngineConfig(gpu_memory_utilization=0.5))
"""


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({}, ["vmm", "0.5", None, "false", "1", "3"]),
        ({KIND: "bfc"}, ["bfc", "0.5", None, "false", "1", "3"]),
        ({SHARE: "0.3"}, ["vmm", "0.3", None, "false", "1", "3"]),
        ({OLD_SHARE: "0.3"}, ["vmm", None, "0.3", "false", "1", "3"]),
        ({PREALLOCATE: "true"}, ["vmm", "0.5", None, "true", "1", "3"]),
        ({NO_LINE_INFO: "0"}, ["vmm", "0.5", None, "false", "0", "3"]),
        ({XLA_LOG: "1"}, ["vmm", "0.5", None, "false", "1", "3"]),
        ({XLA_LOG: "2"}, ["vmm", "0.5", None, "false", "1", "2"]),
    ],
    ids=["open", "kind", "share", "old_share", "preallocate", "line_info", "jaxs_log", "log"],
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


@pytest.mark.parametrize(
    ("names", "expected"),
    [((), 0.75), ((SHARE,), 0.3), ((OLD_SHARE,), 0.3)],
    ids=["neither", "share", "old_share"],
)
def test_share_of_the_allocator(
    names: tuple[str, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SHARE, OLD_SHARE):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "0.3")
    assert allocator_share() == expected
