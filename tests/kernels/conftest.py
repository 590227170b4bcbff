"""What holds for every test of a kernel: how JAX's interpreter runs those in Mosaic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture(autouse=True)
def interpreted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is interpreted neither waits for a kernel nor lets one begin.

    The interpreter knows no launches beside one another. What is lowered for a GPU does both.
    """
    force = plgpu.force_gpu_interpret_mode

    @contextmanager
    def force_alone(params: plgpu.InterpretGPUParams) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch, force(params):
            patch.setattr(plgpu, "griddepcontrol_launch_dependents", lambda: None)
            patch.setattr(plgpu, "griddepcontrol_wait", lambda: None)
            yield

    monkeypatch.setattr(plgpu, "force_gpu_interpret_mode", force_alone)
