"""The circumstances of a measurement whose own process has the device."""

from __future__ import annotations

from typing import Any

import jax

from jaxinfer.bench.circumstances import host_circumstances


def circumstances(*sources: str) -> dict[str, Any]:
    """Facts for a JSON report; ``git_dirty``: whether ``sources`` differ from the commit."""
    return {
        "device": jax.devices()[0].device_kind,
        "num_devices": len(jax.devices()),
        **host_circumstances(*sources),
    }
