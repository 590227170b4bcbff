"""On which devices an engine's arrays lie, and how each is divided among them.

Owns: ``Placement``, made once by the code that starts an engine and passed down from there; nothing
below asks JAX for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

TENSOR = "tensor"  # the mesh axis of tensor parallelism
# Which logical axes are divided, and along which axis of the mesh (Megatron-LM's split, arXiv
# 1909.08053: heads and feed-forward columns, so that a layer adds up twice).
RULES = MappingProxyType({"heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR, "experts": TENSOR})


@dataclass(frozen=True)
class Fused:
    """The logical axis of a dimension in which several parts lie side by side: q, k and v, or gate
    and up. Each shard holds its share of every part.
    """

    name: str
    widths: tuple[int, ...]  # of the parts; their sum is the dimension

    def order(self, num_shards: int) -> np.ndarray:  # int[sum of widths]
        """Positions in the order of shards: for 2 shards q0 k0 v0 q1 k1 v1.

        Raises ``ValueError`` when a width is not a multiple of ``num_shards``.
        """
        parts = np.split(np.arange(sum(self.widths)), np.cumsum(self.widths)[:-1])
        return np.concatenate([part.reshape(num_shards, -1) for part in parts], axis=1).ravel()


type Axis = str | Fused | None  # the logical axis of a dimension; None is never divided
type Axes = tuple[Axis, ...]  # of an array's dimensions in order; those left out are None


@dataclass(frozen=True)
class Placement:
    """The devices of an engine: a mesh whose one axis is ``TENSOR``."""

    mesh: Mesh

    @property
    def device(self) -> Any:  # jax.Device
        """The first device, which tokens are read from and batches are copied to."""
        return self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.mesh.size

    def divided(self, axes: Axes) -> Axes:
        """The axes, with None for those that are not divided here: on one device all."""
        if self.num_devices == 1:
            return (None,) * len(axes)
        return tuple(axis if _name(axis) in RULES else None for axis in axes)

    def sharding(self, axes: Axes = ()) -> Sharding:
        """Where an array with these logical axes lies; on one device that is the device."""
        if self.num_devices == 1:
            return SingleDeviceSharding(self.device)
        names = (_name(axis) for axis in self.divided(axes))
        return NamedSharding(self.mesh, PartitionSpec(*(name and RULES[name] for name in names)))

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: Axes = ()) -> jax.ShapeDtypeStruct:
        """An array with these logical axes, to trace with. On one device it has no sharding: an
        executable that is compiled for one device knows no mesh.
        """
        sharding = None if self.num_devices == 1 else self.sharding(axes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def arranged[A: (np.ndarray, jax.Array)](self, array: A, axes: Axes) -> A:
        """The array with fused dimensions in the order of shards, as it lies on the devices."""
        for dimension, axis in enumerate(self.divided(axes)):
            if isinstance(axis, Fused):
                array = array.take(axis.order(self.num_devices), axis=dimension)
        return array

    def put(self, array: np.ndarray, axes: Axes = ()) -> jax.Array:
        """An array of the host on the devices; it is ``arranged`` already."""
        return jax.device_put(array, self.sharding(axes))


def _name(axis: Axis) -> str | None:
    return axis.name if isinstance(axis, Fused) else axis


def placement_on(devices: Any) -> Placement:  # a sequence of jax.Device
    """An engine on these devices."""
    # Auto: what is traced does not carry shardings in its types
    kinds = (AxisType.Auto,)
    return Placement(jax.make_mesh((len(devices),), (TENSOR,), kinds, devices=tuple(devices)))


def default_placement() -> Placement:
    """An engine on the one device that JAX places new arrays on."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None or isinstance(chosen, str):  # the name of a platform
        chosen = jax.devices(chosen)[0]
    return placement_on([chosen])
