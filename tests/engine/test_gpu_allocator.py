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
# Each case is a fork of one process that has imported JAX, which takes a second.
# jax_num_cpu_devices cannot be changed once a backend has started: then the program fails.
PROGRAM = f"""
import json, os, sys, jax
from jaxinfer import EngineConfig
from jaxinfer.engine.start import build

def check_device(_):
    jax.config.update("jax_num_cpu_devices", 1)
    print(json.dumps([os.environ.get(name) for name in {NAMES!r}]), flush=True)
    os._exit(0)

build.check_device = check_device
for user in json.loads(sys.argv[1]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, user
    else:
        os.environ |= user
        build.plan_engine(EngineConfig(gpu_memory_utilization=0.5))
"""

CASES: dict[str, tuple[dict[str, str], list[str | None]]] = {
    "open": ({}, ["vmm", "0.5", None, "false", "1", "3"]),
    "kind": ({KIND: "bfc"}, ["bfc", "0.5", None, "false", "1", "3"]),
    "share": ({SHARE: "0.3"}, ["vmm", "0.3", None, "false", "1", "3"]),
    "old_share": ({OLD_SHARE: "0.3"}, ["vmm", None, "0.3", "false", "1", "3"]),
    "preallocate": ({PREALLOCATE: "true"}, ["vmm", "0.5", None, "true", "1", "3"]),
    "line_info": ({NO_LINE_INFO: "0"}, ["vmm", "0.5", None, "false", "0", "3"]),
    "jaxs_log": ({XLA_LOG: "1"}, ["vmm", "0.5", None, "false", "1", "3"]),
    "log": ({XLA_LOG: "2"}, ["vmm", "0.5", None, "false", "1", "2"]),
}


@pytest.fixture(scope="module")
def variables() -> dict[str, list[str | None]]:
    """The values of the variables when the backend would start, by case."""
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", PROGRAM, json.dumps([user for user, _ in CASES.values()])]
    done = subprocess.run(command, env=others, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_variables_are_set_before_the_backend_starts(
    case: str, variables: dict[str, list[str | None]]
) -> None:
    assert variables[case] == CASES[case][1]


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
