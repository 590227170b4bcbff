"""The examples run without changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

EXPECTED = {
    "offline": "Tokyo",
    "stream": "100",
    "research": "next token:  Paris",
    "finetune": "after:  Onhava",
    "patching": "layer  0:  +6.",  # the country is read after the first layers
    "logit_lens": "' Paris'",
    "head_ablation": " 0.6 ",
    "linear_probe": "layers.6.resid_post    100.0%",
    "grpo_tunix": "mean reward",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    if example.stem == "grpo_tunix":
        pytest.importorskip("tunix")  # its dependencies are not those of the tests
    # as for users: optax does not obey the strict promotion of dtypes that the tests ask for
    names = os.environ.keys() - {"JAX_NUMPY_DTYPE_PROMOTION"}
    environment = {name: os.environ[name] for name in names}
    command = [sys.executable, example]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    assert EXPECTED[example.stem] in result.stdout
