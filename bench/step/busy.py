"""The time for which a device computes during a call, from JAX's profiler.

Owns: reading a trace. A trace slows the host down, so only the device's own seconds are taken from
it; the length of the call is measured without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
from jax.profiler import ProfileData

DEVICE = "/device:GPU:0"  # the plane of the first GPU; its lines are its streams


def busy_seconds(call: Callable[[], object]) -> float | None:
    """Seconds in which at least one stream had work; None if the trace shows no GPU."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0  # only the device is traced
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(file))
        spans = [
            (event.start_ns, event.start_ns + event.duration_ns)
            for plane in profile.planes
            if plane.name == DEVICE
            for line in plane.lines
            if (line.name or "").startswith("Stream")  # the other lines repeat the streams' events
            for event in line.events
        ]
    return 1e-9 * covered(spans) if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
