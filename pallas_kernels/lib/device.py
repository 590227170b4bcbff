"""The device that kernels are compiled for: JAX's default device, or another one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax

_TARGET: ContextVar[Device | None] = ContextVar("target_device", default=None)


@dataclass(frozen=True)
class Device:
    """The facts of a device that kernels, their launches and machine code depend on."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # the name that the driver reports
    compute_capability: str = "none"  # of an NVIDIA GPU: "9.0"
    num_sms: int = 132  # of a GPU; the default is that of H100 and H200

    @property
    def xla_platform(self) -> str:
        """XLA's name of the platform. All kernels for GPUs are for NVIDIA GPUs."""
        return "cuda" if self.platform == "gpu" else self.platform


def current_device() -> Device:
    """The device of ``compiling_for``, else the one on which JAX places new computations."""
    device = _TARGET.get()
    return _default_device() if device is None else device


@contextmanager
def compiling_for(device: Device) -> Generator[None]:
    """Make ``device`` the current device in this thread for a scope; it need not be present.

    ``jax.jit`` reuses a trace whatever the current device is, so use one device per process.
    """
    token = _TARGET.set(device)
    try:
        yield
    finally:
        _TARGET.reset(token)


def _default_device() -> Device:
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", Device.compute_capability)
    num_sms = getattr(device, "core_count", Device.num_sms)
    return Device(device.platform, device.device_kind, str(capability), num_sms)
