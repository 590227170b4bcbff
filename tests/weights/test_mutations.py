"""Damaged model files end no process, take no memory, and are never accepted with other weights.

`make test` reads a sample in its own process, `make nightly` 2,000 files of each kind in processes
of limited memory.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.read_damaged import KINDS, read_damaged

SAMPLE, BATTERY = 60, 2_000
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_sample_of_damage(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = read_damaged(name, SAMPLE)
    assert sum(found.values()) == SAMPLE and found["refused"] > SAMPLE / 3
    capfd.readouterr()  # what the tokenizers' library prints when it panics


@pytest.mark.nightly
@pytest.mark.parametrize("name", KINDS)
def test_2000_damaged_files(name: str) -> None:
    command = [sys.executable, "-m", "kit.read_damaged", name, str(BATTERY)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    print(name, done.stdout)
