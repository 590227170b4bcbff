"""Machine code of kernels in Mosaic: made in one process, used in another.

Mosaic compiles a kernel when XLA compiles what calls it, and remembers it by its hash as long as
the process lives. An executable is saved with the kernels in it, and whoever loads it remembers
them, too. So a process without a GPU can compile a call of a kernel for one that is described, and
the process that has the GPU takes the kernel over without a compiler. That matters since Mosaic and
XLA take turns at LLVM, whose options are a process's: where both compile, each waits for the other.

Owns: ``Alone``, ``take_over``. Must not know: how kernels are lowered or linked, which process is
which.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.experimental import serialize_executable, topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.device import Device

# An NVIDIA GPU that need not be there, as XLA describes one. Where nothing but kernels is compiled,
# only the compute capability counts; without the other limits XLA warns of arrays beyond them.
TARGET = """
platform_name: "CUDA"
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {cores}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  device_memory_size: 1099511627776
}}
"""
OWN_FEATURES = (
    "feature_extension: ACCELERATED_FEATURES"  # instructions that no other GPU has (sm_90a)
)
FIRST_WITH_FEATURES = 9  # compute capability


@dataclass(frozen=True)
class Alone:
    """A call of kernels by itself, by all that decides what is compiled."""

    name: str
    module: bytes  # in StableHLO, as ``export`` serialises it; of flat arguments and results
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    device: Device
    in_place: tuple[int, ...] = ()  # arguments that are changed

    def __str__(self) -> str:
        return self.name

    def compiled(self) -> bytes:
        """An executable for the device, to be taken over by a process that has it."""
        placed: dict[str, Any] = {}
        if self.device.platform != "cpu":
            sharding = SingleDeviceSharding(described_device(self.device))
            placed = {"in_shardings": sharding, "out_shardings": sharding}
        platform = self.device.xla_platform
        like = export.export(jax.jit(self._zeros, keep_unused=True), platforms=[platform])
        exported = replace(like(*self.arguments), mlir_module_serialized=self.module)
        # As in a step, pools are changed in place.
        call = jax.jit(exported.call, donate_argnums=self.in_place, **placed)
        return pickle.dumps(serialize_executable.serialize(call.lower(*self.arguments).compile()))

    def _zeros(self, *_: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(x.shape, x.dtype) for x in self.results)


def take_over(executable: bytes) -> None:
    """Have this process, which has the device, know the kernels of what was compiled for it."""
    device = jax.devices()[0]
    serialize_executable.deserialize_and_load(
        *pickle.loads(executable), backend=device.client, execution_devices=[device]
    )


@cache
def described_device(device: Device) -> Any:
    """Jax's device for ``device``, one NVIDIA GPU, to compile for; it need not be there."""
    major, minor = device.compute_capability.split(".")
    features = OWN_FEATURES if int(major) >= FIRST_WITH_FEATURES else ""
    target = TARGET.format(
        major=major, minor=minor, features=features, cores=device.multiprocessors
    )
    described = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target
    )
    return described.devices[0]
