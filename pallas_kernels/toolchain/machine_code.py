"""A Mosaic kernel compiled in one process and loaded in another.

Mosaic compiles a kernel when XLA compiles a module that calls it, and caches it by its hash for
the life of the process. A saved executable contains its kernels, and loading it puts them into that
cache. So a worker without a GPU compiles an executable of one kernel for a described GPU, and the
process that has the GPU loads the executable without compiling the kernel. This matters because
Mosaic and XLA use LLVM with different options, which are per process: in one process the two would
wait for each other.
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
from jax.sharding import SingleDeviceSharding

from pallas_kernels.lib.device import Device
from pallas_kernels.toolchain.jax_internals import (
    MODULE,
    MOSAIC_CALL,
    aliases_of,
    custom_calls,
    dtype_to_ir_type,
    ir,
    make_ir_context,
    read_module,
    set_attribute,
    write_module,
)
from pallas_kernels.toolchain.link_modules import LinkedLaunch, linked_module

DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "int32",
    "int8",
    "uint8",
    "float8_e4m3fn",
)  # of kernel arguments
# XLA's description of an NVIDIA GPU that need not be present. For kernels only the compute
# capability matters; without the other limits XLA warns about large arrays.
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
# Instructions of one architecture only (sm_90a), and the first compute capability that has some.
OWN_FEATURES, FIRST_WITH_FEATURES = "feature_extension: ACCELERATED_FEATURES", 9

# Calls a method of an object that can be pickled, in this process or in another.
type Run = Callable[[MethodType], bytes]


def run_here(method: MethodType) -> bytes:
    """Call the method in this process."""
    return method()


@dataclass(frozen=True)
class KernelCall:
    """One custom call of a kernel, or of linked kernels: the identity of its machine code.

    The operations around the call are left out: XLA takes as long for those as for the kernel.
    """

    name: str
    device: Device
    module: bytes  # a module of only this call, serialised as by ``export``
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    in_place: tuple[int, ...]  # arguments that are written
    launches: tuple[LinkedLaunch, ...] = ()  # of linked kernels, whose module is made of them

    @classmethod
    def of(
        cls, call: Any, name: str, device: Device, launches: tuple[LinkedLaunch, ...] = ()
    ) -> Self:
        """A call in a module, an ``ir.Operation``, within the module's context."""
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
        shapes, in_place = (_shapes(inputs), _shapes(outputs)), sorted(aliases_of(call).values())
        return cls(name, device, write_module(module), *shapes, tuple(in_place), launches)

    def __str__(self) -> str:
        return self.name

    def compile(self, run: Run = run_here) -> None:
        """Load the machine code of its kernels into this process, which has the device; ``run`` may
        compile it in another one.
        """
        preload_kernels(run(self.compiled))

    def compiled(self) -> bytes:
        """An executable for the device, which need not be present, for ``preload_kernels``."""
        placed: dict[str, Any] = {}
        if self.device.platform != "cpu":
            sharding = SingleDeviceSharding(described_device(self.device))
            placed = {"in_shardings": sharding, "out_shardings": sharding}
        platform = self.device.xla_platform
        like = export.export(jax.jit(self._zeros, keep_unused=True), platforms=[platform])
        exported = replace(like(*self.arguments), mlir_module_serialized=self.complete_module())
        # Pools are written in place, as in a step.
        call = jax.jit(exported.call, donate_argnums=self.in_place, **placed)
        return pickle.dumps(serialize_executable.serialize(call.lower(*self.arguments).compile()))

    def complete_module(self) -> bytes:
        """The module of only this call, with its kernel."""
        if not self.launches:
            return self.module
        with make_ir_context():
            module = read_module(self.module)
            (call,) = custom_calls(module.operation, MOSAIC_CALL)
            set_attribute(call, MODULE, linked_module(self.launches))
            return write_module(module)

    def _zeros(self, *_: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(x.shape, x.dtype) for x in self.results)


def _shapes(types: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    by_type = {str(dtype_to_ir_type(jnp.dtype(name))): name for name in DTYPES}
    tensors = [ir.RankedTensorType(kind) for kind in types]
    return tuple(
        jax.ShapeDtypeStruct(tuple(x.shape), by_type[str(x.element_type)]) for x in tensors
    )


def preload_kernels(executable: bytes) -> None:
    """Put the kernels of an executable into Mosaic's cache in this process, which has the device.

    Loading the executable is enough: its entry point is dropped, the cache keeps the kernels.
    """
    device = jax.devices()[0]
    serialize_executable.deserialize_and_load(
        *pickle.loads(executable), backend=device.client, execution_devices=[device]
    )


@cache
def described_device(device: Device) -> Any:
    """JAX's device object for one NVIDIA GPU, to compile for; it need not be present."""
    major, minor = device.compute_capability.split(".")
    features = OWN_FEATURES if int(major) >= FIRST_WITH_FEATURES else ""
    target = TARGET.format(major=major, minor=minor, features=features, cores=device.num_sms)
    described = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=target
    )
    return described.devices[0]
