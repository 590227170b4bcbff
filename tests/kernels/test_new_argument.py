"""A new argument of an op touches four files, no signature among them.

They are the record and the definition (one file), each implementation, and the test cases.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PATCH = TESTS / "data/new_argument.patch"  # ``v_factor`` of kv_append, which multiplies values
CASES = [f"kv_append/{impl}/smollm2_scaled" for impl in ("triton", "xla")]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has no packages for this system")
def test_a_new_argument_touches_four_files(tmp_path: Path) -> None:
    kernels = tmp_path / "pallas_kernels"
    shutil.copytree(TESTS.parent / "pallas_kernels", kernels)
    subprocess.run(["git", "apply", PATCH], cwd=tmp_path, check=True)
    assert PATCH.read_text().count("\n+++ ") == 4
    path = os.pathsep.join((str(tmp_path), str(TESTS)))
    swept = subprocess.run(
        [sys.executable, "-m", "kit.triton_sweep", *CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    assert json.loads(swept.stdout) == dict.fromkeys(CASES)
