"""The examples run without changes."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import jax
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
    "ray_serve": "Paris",
    "own_connector": "engine 1 reused 1",
}
OF_EXTRAS = {"grpo_tunix": "tunix", "ray_serve": "ray"}  # which the tests do not install


# 10 to 30 s each on two cores: nightly
SLOW = ("finetune", "linear_probe", "head_ablation", "patching", "ray_serve", "own_connector")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] * (path.stem in SLOW))
        for path in EXAMPLES
    ],
)
def test_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: eight more would import JAX and compile the same steps each. Ray's imports
    give warnings, so its example has a process of its own.
    """
    if example.stem in OF_EXTRAS:
        pytest.importorskip(OF_EXTRAS[example.stem], reason="an extra that is not installed")
    if example.stem == "ray_serve":
        command = [sys.executable, str(example)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
        assert EXPECTED[example.stem] in done.stdout, done.stderr
        return
    with jax.numpy_dtype_promotion("standard"):  # as for users: optax needs it
        runpy.run_path(str(example), run_name="__main__")
    assert EXPECTED[example.stem] in capsys.readouterr().out
