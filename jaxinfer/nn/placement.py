"""``Placement``: the devices of an engine, and the division of arrays among them.

The code that starts an engine makes it once and passes it on; other code does not query JAX's
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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

from jaxinfer.core.errors import ArgumentError

TENSOR = "tensor"  # the mesh axis of tensor parallelism
# The logical axes that are divided, and the mesh axis for each (as in Megatron-LM, arXiv
# 1909.08053: heads and feed-forward columns, so that a layer has two all-reduces).
RULES = MappingProxyType({"heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR, "experts": TENSOR})


@dataclass(frozen=True)
class Fused:
    """The logical axis of a dimension with several concatenated parts: q, k and v, or gate and up.

    Each shard has an equal share of every part.
    """

    name: str
    widths: tuple[int, ...]  # widths of the parts; their sum is the dimension

    def order(self, num_shards: int) -> np.ndarray:  # int[sum of widths]
        """Positions in the order of shards: for 2 shards q0 k0 v0 q1 k1 v1.

        Raises ``ValueError`` when a width is not a multiple of ``num_shards``.
        """
        parts = np.split(np.arange(sum(self.widths)), np.cumsum(self.widths)[:-1])
        return np.concatenate([part.reshape(num_shards, -1) for part in parts], axis=1).ravel()


type Axis = str | Fused | None  # the logical axis of a dimension; None is never divided
type Axes = tuple[Axis, ...]  # of an array's dimensions in order; None for missing ones at the end


@dataclass(frozen=True)
class Placement:
    """The devices of an engine: a mesh whose one axis is ``TENSOR``.

    With ``by_shard`` the parts of fused dimensions are in the order of shards, as steps that run on
    each shard need them; without, they are in the order of the model, as functions of whole arrays
    need them.
    """

    mesh: Mesh
    by_shard: bool = True

    @property
    def device(self) -> Any:  # jax.Device
        """The first device: tokens are read from it, and batches are copied to it."""
        return self.mesh.devices.flat[0]

    @property
    def devices(self) -> tuple[Any, ...]:  # of jax.Device
        """All devices, in the order of the mesh; JAX may know of others."""
        return tuple(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def num_devices(self) -> int:
        """The number of devices in the mesh."""
        return self.mesh.size

    @property
    def axis(self) -> str | None:
        """The mesh axis along which steps are divided; None on one device."""
        return TENSOR if self.num_devices > 1 else None

    def divided(self, axes: Axes) -> Axes:
        """The axes, with None for those that are not divided; on one device none is."""
        if self.num_devices == 1:
            return (None,) * len(axes)
        return tuple(axis if _name(axis) in RULES else None for axis in axes)

    def sharding(self, axes: Axes = ()) -> Sharding:
        """The sharding of an array with these logical axes; on one device it is the device."""
        if self.num_devices == 1:
            return SingleDeviceSharding(self.device)
        names = (_name(axis) for axis in self.divided(axes))
        return NamedSharding(self.mesh, PartitionSpec(*(name and RULES[name] for name in names)))

    def abstract(self, shape: tuple[int, ...], dtype: Any, axes: Axes = ()) -> jax.ShapeDtypeStruct:
        """An abstract array with these logical axes.

        On one device it has no sharding, as its executables are compiled without a mesh, for JAX's
        default device: see ``as_default``.
        """
        sharding = None if self.num_devices == 1 else self.sharding(axes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def trace(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        donated: tuple[int, ...] = (),
        *,
        has_result: bool = True,
    ) -> jax.stages.Traced:
        """Trace a function, on several devices with each one's share of divided arguments.

        It returns the ``donated`` arguments, changed, and after them its result, if it has one,
        which is whole on each device and equal; a single one of these is not in a tuple.
        """
        if self.num_devices > 1:
            given = jax.tree.map(_partition, arguments)
            out = [given[i] for i in donated]
            if has_result:
                out.append(PartitionSpec())
            function = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=given,
                out_specs=tuple(out) if len(out) > 1 else out[0],
                check_vma=False,  # it does not know this library's kernels
            )
        return jax.jit(function, donate_argnums=donated).trace(*arguments)

    def as_default(self) -> AbstractContextManager[Any]:
        """Make the first device JAX's default device, for this thread within a scope."""
        return jax.default_device(self.device)

    def arranged[A: (np.ndarray, jax.Array)](self, array: A, axes: Axes) -> A:
        """The array in the devices' layout, see ``by_shard``."""
        if not self.by_shard:
            return array
        for dimension, axis in enumerate(self.divided(axes)):
            if isinstance(axis, Fused):
                array = array.take(axis.order(self.num_devices), axis=dimension)
        return array

    def put(self, array: np.ndarray, axes: Axes = ()) -> jax.Array:
        """Put a host array, which must be ``arranged`` already, on the devices."""
        return jax.device_put(array, self.sharding(axes))


def _partition(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _name(axis: Axis) -> str | None:
    return axis.name if isinstance(axis, Fused) else axis


def placement_on(devices: Any) -> Placement:  # a sequence of jax.Device
    """A placement on these devices."""
    # Auto: types of traced arrays have no shardings
    kinds = (AxisType.Auto,)
    return Placement(jax.make_mesh((len(devices),), (TENSOR,), kinds, devices=tuple(devices)))


def placement_in(mesh: Mesh) -> Placement:
    """A placement of whole arrays on the devices of any mesh with one axis of several devices.

    Raises ``ArgumentError`` for another mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if sum(size > 1 for size in mesh.shape.values()) > 1:
        raise ArgumentError(
            f"parameters are divided along one axis, and the mesh has {dict(mesh.shape)}; give a "
            "mesh whose other axes have one device"
        )
    return replace(placement_on(list(mesh.devices.flat)), by_shard=False)


def placement_of_ids(device_ids: Sequence[int]) -> Placement:
    """A placement on the devices with these ids, of another process' placement."""
    by_id = {device.id: device for device in jax.devices()}
    return placement_on([by_id[number] for number in device_ids])


def default_placement() -> Placement:
    """A placement on JAX's default device."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):  # the name of a platform
        device = jax.devices(device)[0]
    return placement_on([device])
