"""On which devices an engine's arrays lie, and how each is divided among them.

Owns: ``Placement``, made once by whoever starts an engine and handed down from there; nothing below
asks JAX for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

type Axes = tuple[str | None, ...]  # of an array, one logical name for each dimension

TENSOR = "tensor"  # the mesh axis of tensor parallelism
# Which logical axes are divided, and along which axis of the mesh (Megatron-LM's split, arXiv
# 1909.08053: heads and feed-forward columns, so that a layer adds up twice).
RULES = MappingProxyType({"heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR, "experts": TENSOR})


@dataclass(frozen=True)
class Placement:
    """The devices of an engine: a mesh whose one axis is ``TENSOR``."""

    mesh: Mesh

    @property
    def device(self) -> Any:  # jax.Device
        """The first device, which tokens are read from and batches are copied to."""
        return self.mesh.devices.flat[0]

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.mesh.size

    def sharding(self, axes: Axes = ()) -> Sharding:
        """Where an array with these logical axes lies. On one device that is the device: an
        executable that is compiled for it knows no mesh.
        """
        if self.num_devices == 1:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, PartitionSpec(*(RULES.get(axis or "") for axis in axes)))

    def put(self, array: Any, axes: Axes = ()) -> jax.Array:
        """An array of the host on the devices."""
        return jax.device_put(array, self.sharding(axes))


def placement_on(devices: Any) -> Placement:  # a sequence of jax.Device
    """An engine on these devices."""
    return Placement(jax.make_mesh((len(devices),), (TENSOR,), devices=tuple(devices)))


def default_placement() -> Placement:
    """An engine on the first device of JAX's default backend."""
    return placement_on(jax.devices()[:1])
