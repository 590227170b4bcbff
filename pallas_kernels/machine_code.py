"""Machine code of kernels in Mosaic: made in one process, used in another.

Mosaic compiles a kernel when XLA compiles what calls it, and remembers it by its hash as long as
the process lives. An executable is saved with the kernels in it, and whoever loads it remembers
them, too. So a process without a GPU can compile a call of a kernel for one that is described, and
the process that has the GPU takes the kernel over without a compiler. That matters since Mosaic and
XLA take turns at LLVM, whose options are a process's: where both compile, each waits for the other.

Owns: ``KernelCall`` and ``take_over``. Must not know: how kernels are lowered or linked, which
process is which.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MethodType
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import export
from jax.experimental import serialize_executable, topologies
from jax.extend.mlir import serialize_portable_artifact
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import dtype_to_ir_type, ir
from jax.sharding import SingleDeviceSharding

from pallas_kernels.custom_calls import MODULE, attribute_of, in_place_of
from pallas_kernels.device import Device

DTYPES = ("bfloat16", "float16", "float32", "int32", "float8_e4m3fn")  # of what kernels take
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
# Instructions that no other GPU has (sm_90a), and the first compute capability with some.
OWN_FEATURES, FIRST_WITH_FEATURES = "feature_extension: ACCELERATED_FEATURES", 9

type Run = Callable[[MethodType], bytes]  # calls a method of what can be pickled, here or elsewhere


def run_here(method: MethodType) -> bytes:
    """In this process."""
    return method()


@dataclass(frozen=True)
class KernelCall:
    """The call of a kernel, or of linked ones, and nothing else, by all that decides what is
    compiled. (What is made around it in a step is compiled there; XLA would take as long for that
    as for the kernel.)
    """

    name: str
    device: Device
    kernel: bytes  # Mosaic's module
    module: bytes  # a module of this call alone, as ``export`` serialises it
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    in_place: tuple[int, ...]  # arguments that are changed

    @classmethod
    def of(cls, call: Any, name: str, device: Device) -> Self:  # of an ir.Operation
        """A call in a module, within the module's context."""
        inputs, outputs = ([x.type for x in values] for values in (call.operands, call.results))
        module = ir.Module.parse("module @alone {}")
        with ir.Location.unknown(), ir.InsertionPoint(module.body):
            kind = ir.TypeAttr.get(ir.FunctionType.get(inputs, outputs))
            named = {"sym_name": ir.StringAttr.get("main"), "function_type": kind}
            function = ir.Operation.create("func.func", attributes=named, regions=1)
            block = ir.Block.create_at_start(function.regions[0], inputs)
        with ir.Location.unknown(), ir.InsertionPoint(block):
            copy = call.clone()
            for i, argument in enumerate(block.arguments):
                copy.operands[i] = argument
            ir.Operation.create("func.return", operands=list(copy.results))
        artifact = serialize_portable_artifact(module, stablehlo.get_current_version())
        shapes, in_place = (_shapes(inputs), _shapes(outputs)), sorted(in_place_of(call).values())
        return cls(name, device, attribute_of(call, MODULE), artifact, *shapes, tuple(in_place))

    def __str__(self) -> str:
        return self.name

    def compile(self, run: Run = run_here) -> None:
        """Have the machine code of its kernels in this process, which has the device; ``run`` may
        have another one compile it.
        """
        take_over(run(self.compiled))

    def compiled(self) -> bytes:
        """An executable for the device, which need not be there, to be taken over."""
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


def _shapes(types: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    by_type = {str(dtype_to_ir_type(jnp.dtype(name))): name for name in DTYPES}
    tensors = [ir.RankedTensorType(kind) for kind in types]
    return tuple(
        jax.ShapeDtypeStruct(tuple(x.shape), by_type[str(x.element_type)]) for x in tensors
    )


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
