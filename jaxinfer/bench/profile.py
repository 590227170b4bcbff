"""``--profile``: the rows of a profile that an engine took, for the run's folder."""

from __future__ import annotations

from pathlib import Path

from jaxinfer.bench.floor import CEILINGS
from jaxinfer.bench.profile_table import Profiled
from jaxinfer.bench.profile_trace import kernels_of, read_steps, read_trace


def profiled_in(folder: Path, run: Path) -> Profiled:
    """The rows of a profile's folder, which may be in that of the run.

    Raises ``BenchError`` if it has no trace, or one without events of a device.
    """
    steps = read_steps(folder)
    ceiling = CEILINGS.get(steps.device)
    return Profiled(
        device=steps.device,
        num_devices=steps.num_devices,
        bytes_per_s=None if ceiling is None else ceiling.bytes_per_s,
        flops_per_s=None if ceiling is None else ceiling.flops_per_s,
        costs=steps.costs,
        trace=str(folder.relative_to(run) if folder.is_relative_to(run) else folder),
        steps=steps.steps,
        kernels=kernels_of(read_trace(folder), steps),
    )
