"""``Placement``: the devices of an engine, and the division of arrays among them.

The code that starts an engine makes it once and passes it on; other code does not query JAX's
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
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

from jaxinfer.core.errors import ArgumentError, ConfigError
from jaxinfer.core.shapes import cdiv, round_up

TENSOR = "tensor"  # the mesh axis of tensor parallelism
# The logical axes that are divided, and the mesh axis for each (as in Megatron-LM, arXiv
# 1909.08053: heads and feed-forward columns, so that a layer has two all-reduces).
RULES = MappingProxyType({"heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR, "experts": TENSOR})
VOCAB = "vocab"
# A device's part of the vocabulary is rounded up to so many tokens, which kernels read at once;
# the last device has rows of zeros behind the vocabulary, whose logits are left out.
VOCAB_STEP = 64
EXPERT_STEP = 64  # columns of an expert that a device has: kernels read so many at once


def slices_experts(width: int, devices: int, block: int, *, whole: bool = False) -> bool:
    """True if each device has a part of the columns of every expert, False if whole experts.

    With slices all devices read equally much whatever experts the tokens choose: of 8 of 128
    experts the fuller of two devices would have 5.1 on average. ``width`` are the columns of an
    expert, ``block`` those that share scales (1: none do); ``whole`` asks for whole experts.
    """
    own, rest = divmod(width, devices)
    return not (whole or rest or own % EXPERT_STEP or own % block)


@dataclass(frozen=True)
class Fused:
    """The logical axis of a dimension with several concatenated parts: q, k and v, or gate and up.

    Each device has an equal share of every part. With ``units`` a part consists of so many units,
    heads for example, that are not cut; of fewer units than devices each is on several devices.
    """

    name: str
    widths: tuple[int, ...]  # widths of the parts; their sum is the dimension
    units: tuple[int, ...] = ()  # of each part

    def _positions(self, devices: int) -> np.ndarray:
        parts, start = list[np.ndarray](), 0
        for width, units in zip(self.widths, self.units or self.widths, strict=True):
            own = np.arange(start, start + width).reshape(units, -1)
            if self.units and not devices % units:
                own = np.repeat(own, devices // units, axis=0)
            elif self.units and units % devices:
                raise ValueError(f"{units} units cannot be divided among {devices} devices")
            parts.append(own.reshape(devices, -1))
            start += width
        return np.concatenate(parts, axis=1)


type Axis = str | Fused | None  # the logical axis of a dimension; None is never divided
type Axes = tuple[Axis, ...]  # of an array's dimensions in order; None for missing ones at the end


def is_divided(axis: Axis) -> bool:
    """True if a dimension with this axis is divided among devices."""
    return name_of(axis) in RULES


def name_of(axis: Axis) -> str | None:
    """The name of an axis."""
    return axis.name if isinstance(axis, Fused) else axis


def positions(axis: Axis, size: int, devices: int) -> np.ndarray:  # int[devices, own]
    """For each device the positions that it has of a divided dimension of this size; -1: zeros.

    Raises ``ValueError`` if the dimension cannot be divided.
    """
    if isinstance(axis, Fused):
        return axis._positions(devices)
    if axis != VOCAB:
        return np.arange(size).reshape(devices, -1)
    own = round_up(cdiv(size, devices), VOCAB_STEP)
    found = np.arange(devices * own)
    return np.where(found < size, found, -1).reshape(devices, own)


@dataclass(frozen=True)
class Placement:
    """The devices of an engine: a mesh whose one axis is ``TENSOR``.

    Arrays are divided evenly. The model says in which order they are: see ``Model.devices``. Of
    several hosts each has a process with the same mesh, which puts arrays on its own devices only.
    """

    mesh: Mesh

    @property
    def device(self) -> Any:  # jax.Device
        """The first device of this process: tokens are read from it, and batches copied to it."""
        return self.own_devices[0]

    @property
    def devices(self) -> tuple[Any, ...]:  # of jax.Device
        """All devices, in the order of the mesh; JAX may know of others."""
        return tuple(self.mesh.devices.flat)

    @cached_property
    def own_ranks(self) -> tuple[int, ...]:
        """The numbers of the devices of this process; on one host those of all."""
        own = self.mesh.devices.flat[0].client.process_index()
        return tuple(i for i, one in enumerate(self.devices) if one.process_index == own)

    @cached_property
    def own_devices(self) -> tuple[Any, ...]:  # of jax.Device
        """The devices of this process, in the order of the mesh."""
        return tuple(self.devices[rank] for rank in self.own_ranks)

    @cached_property
    def num_hosts(self) -> int:
        """The number of processes that have the devices."""
        return len({device.process_index for device in self.devices})

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
        return tuple(axis if is_divided(axis) else None for axis in axes)

    def sharding(self, axes: Axes = ()) -> Sharding:
        """The sharding of an array with these logical axes; on one device it is the device."""
        if self.num_devices == 1:
            return SingleDeviceSharding(self.device)
        names = (name_of(axis) for axis in self.divided(axes))
        return NamedSharding(self.mesh, PartitionSpec(*(name and RULES[name] for name in names)))

    def own_shape(self, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        """The shape of a device's part of an array."""
        return self.sharding(axes).shard_shape(shape)

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

    def put(self, array: np.ndarray, axes: Axes = ()) -> jax.Array:
        """Put a host array on the devices, each part on its own; every host has all of it."""
        sharding = self.sharding(axes)
        if self.num_hosts > 1:  # device_put would first compare the array with those of all hosts
            return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
        return jax.device_put(array, sharding)

    def of_parts(self, parts: Sequence[jax.Array], axes: Axes = ()) -> jax.Array:
        """The array whose parts, or for undivided ones copies, are on the devices in order; on
        several hosts ``parts`` are those of this one.
        """
        if self.num_devices == 1:
            return parts[0]
        divided = [is_divided(axis) for axis in axes]
        padded = (*divided, *(False for _ in parts[0].shape[len(divided) :]))
        shape = tuple(
            size * (self.num_devices if own else 1)
            for size, own in zip(parts[0].shape, padded, strict=True)
        )
        sharding = self.sharding(axes)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))


def _partition(array: Any) -> PartitionSpec:
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def placement_on(devices: Any) -> Placement:  # a sequence of jax.Device
    """A placement on these devices."""
    # Auto: types of traced arrays have no shardings
    kinds = (AxisType.Auto,)
    return Placement(jax.make_mesh((len(devices),), (TENSOR,), kinds, devices=tuple(devices)))


def placement_in(mesh: Mesh) -> Placement:
    """A placement on the devices of any mesh with one axis of several devices.

    Raises ``ArgumentError`` for another mesh.
    """
    if not isinstance(mesh, Mesh):
        raise ArgumentError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if sum(size > 1 for size in mesh.shape.values()) > 1:
        raise ArgumentError(
            f"parameters are divided along one axis, and the mesh has {dict(mesh.shape)}; give a "
            "mesh whose other axes have one device"
        )
    return placement_on(list(mesh.devices.flat))


def placement_of_ids(device_ids: Sequence[int]) -> Placement:
    """A placement on the devices with these ids, of another process' placement."""
    by_id = {device.id: device for device in jax.devices()}
    return placement_on([by_id[number] for number in device_ids])


def default_placement(count: int = 1, hosts: int = 1) -> Placement:
    """A placement on JAX's default device, or on several devices of its platform.

    Of several ``hosts`` each has as many, in the order of their ranks. Raises ``ConfigError`` if
    there are fewer, or if they are of several kinds.
    """
    if hosts > 1:
        return _placement_of_hosts(count, hosts)
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None or isinstance(device, str):  # the name of a platform
        device = jax.devices(device)[0]
    if count == 1:
        return placement_on([device])
    found = jax.local_devices(backend=device.platform)
    if len(found) < count:
        more = f" (JAX_NUM_CPU_DEVICES={count} makes some)" if device.platform == "cpu" else ""
        raise ConfigError(
            f"tensor_parallel_size is {count}, and JAX finds {len(found)} device"
            f"{'s' * (len(found) != 1)} of the platform {device.platform}; lower it, or show JAX "
            f"more devices{more}"
        )
    return placement_on(one_kind(found[:count]))


def _placement_of_hosts(count: int, hosts: int) -> Placement:
    each, found = count // hosts, list[Any]()
    for rank in range(hosts):
        own = [device for device in jax.devices() if device.process_index == rank]
        if len(own) < each:
            raise ConfigError(
                f"tensor_parallel_size is {count}, so each of {hosts} hosts needs {each} devices, "
                f"and host {rank} has {len(own)}; lower it"
            )
        found += own[:each]
    return placement_on(one_kind(found))


def one_kind(devices: list[Any]) -> list[Any]:  # of jax.Device
    """The devices; raises ``ConfigError`` if they are of several kinds."""
    kinds = dict.fromkeys(device.device_kind for device in devices)
    if len(kinds) > 1:
        raise ConfigError(
            f"the devices are of several kinds, {' and '.join(kinds)}, and steps are compiled for "
            "one; choose equal ones, for GPUs with CUDA_VISIBLE_DEVICES"
        )
    return devices
