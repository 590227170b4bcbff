"""The device that kernels are compiled for: jax's default one, or one that is described."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax

_DESCRIBED: ContextVar[Device | None] = ContextVar("described_device", default=None)


@dataclass(frozen=True)
class Device:
    """All that decides which kernels are chosen, how they are launched and what is compiled."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # as its driver calls it
    compute_capability: str = "none"  # of an NVIDIA GPU: "9.0"
    multiprocessors: int = 132  # of a GPU; those of an H100 or H200 where a device does not say

    @property
    def xla_platform(self) -> str:
        """As XLA calls the platform. Kernels for GPUs are for NVIDIA's alone."""
        return "cuda" if self.platform == "gpu" else self.platform


def current_device() -> Device:
    """The described device within ``described``, else the one jax places new computations on."""
    device = _DESCRIBED.get()
    return _default_device() if device is None else device


@contextmanager
def described(device: Device) -> Generator[None]:
    """Within it, and in this thread alone, ``device`` is the current one; it need not be present.

    ``jax.jit`` reuses traces whatever device is described: describe only one in a process.
    """
    token = _DESCRIBED.set(device)
    try:
        yield
    finally:
        _DESCRIBED.reset(token)


def _default_device() -> Device:
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", Device.compute_capability)
    cores = getattr(device, "core_count", Device.multiprocessors)
    return Device(device.platform, device.device_kind, str(capability), cores)
