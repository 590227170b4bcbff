"""The host code of linked kernels, as MLIR text: their module without the kernels.

It calls the CUDA driver by the names that Mosaic's runtime exports, and is for Hopper only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# cuda.h: CUlaunchAttributeID and CUfunction_attribute
PROGRAMMATIC_SERIALIZATION, CLUSTER_DIMENSION = 6, 4
MAX_DYNAMIC_SHARED_BYTES = 8
# CUlaunchAttribute is 4 bytes of id, 4 of padding, 64 of value; CUlaunchConfig: grid, block,
# dynamic shared bytes, stream, attributes, how many.
ATTRIBUTE = "!llvm.struct<(i32, i32, i32, i32, i32, array<13 x i32>)>"
CONFIG = "!llvm.struct<(i32, i32, i32, i32, i32, i32, i32, ptr, ptr, i32)>"
CONFIG_FIELDS = (
    *((name, "i32") for name in ("grid_x", "grid_y", "grid_z", "block", "one", "one", "shared")),
    ("stream", "!llvm.ptr"),
    ("first", "!llvm.ptr"),
    ("count", "i32"),
)


class HostLaunch(NamedTuple):
    """A launch: the kernel's number and name, indices of its arrays among those of the call, and
    whether it may start before the previous one has ended.
    """

    kernel: int
    name: str
    arrays: tuple[int, ...]
    begins_early: bool


def host_module(launches: Sequence[HostLaunch]) -> str:
    """The module, without the kernels and their own host code. The host code is to be put in the
    functions ``host0``, ``host1`` ..., the kernels next to ``nothing`` in ``kernels``.
    """
    names, hosts, calls, places = [], [], [], list[int]()
    for number, name in sorted({launch.kernel: launch.name for launch in launches}.items()):
        names.append(f'llvm.mlir.global internal constant @name{number}("{name}\\00")')
        hosts.append(
            f"func.func private @host{number}(%module: !llvm.ptr, %stream: !llvm.ptr, "
            "%arrays: !llvm.ptr, %begins_early: i32) { return }"
        )
    for i, launch in enumerate(launches):
        begins_early = "%one" if launch.begins_early else "%zero"
        calls.append(
            f"%begin{i} = llvm.mlir.constant({len(places)} : i32) : i32\n"
            f"%count{i} = llvm.mlir.constant({len(launch.arrays)} : i32) : i32\n"
            f"llvm.call @gather(%arrays, %begin{i}, %count{i}, %own) : "
            "(!llvm.ptr, i32, i32, !llvm.ptr) -> ()\n"
            f"func.call @host{launch.kernel}(%module, %stream, %own, {begins_early}) : "
            "(!llvm.ptr, !llvm.ptr, !llvm.ptr, i32) -> ()"
        )
        places.extend(launch.arrays)
    config = []
    for i, (name, kind) in enumerate(CONFIG_FIELDS):
        config.append(f"%at{i} = llvm.getelementptr %config[0, {i}] : {_AT} {CONFIG}")
        config.append(f"llvm.store %{name}, %at{i} : {kind}, !llvm.ptr")
    return _TEXT.format(
        names="\n".join(names),
        hosts="\n".join(hosts),
        calls="\n".join(calls),
        config="\n".join(config),
        places=f"dense<{places}> : tensor<{len(places)}xi32>",
        num_places=len(places),
        most=max(len(launch.arrays) for launch in launches),
        attribute=ATTRIBUTE,
        config_type=CONFIG,
        at=_AT,
        programmatic=PROGRAMMATIC_SERIALIZATION,
        cluster=CLUSTER_DIMENSION,
        shared_bytes=MAX_DYNAMIC_SHARED_BYTES,
    )


_AT = "(!llvm.ptr) -> !llvm.ptr,"
_TEXT = """
module attributes {{gpu.container_module, sym_name = "linked",
    mosaic_gpu.arch_major = 9 : i32, mosaic_gpu.arch_minor = 0 : i32}} {{
func.func private @mosaic_gpu_init_tma_desc(
  !llvm.ptr, !llvm.ptr, i64, i64, !llvm.ptr, !llvm.ptr, i64, !llvm.ptr)
llvm.func @cuFuncGetModule(!llvm.ptr, !llvm.ptr) -> i32
llvm.func @cuModuleGetFunction(!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
llvm.func @cuFuncSetAttribute(!llvm.ptr, i32, i32) -> i32
llvm.func @cuLaunchKernelEx(!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
llvm.func @abort()
llvm.mlir.global internal constant @places({places}) : !llvm.array<{num_places} x i32>
{names}

// Aborts like Mosaic when CUDA refuses a launch.
llvm.func internal @check(%result: i32) {{
  %success = llvm.mlir.constant(0 : i32) : i32
  %failed = llvm.icmp "ne" %result, %success : i32
  llvm.cond_br %failed, ^bb1, ^bb2
^bb1:
  llvm.call @abort() : () -> ()
  llvm.unreachable
^bb2:
  llvm.return
}}

// The arrays of one launch among those of the call.
llvm.func internal @gather(%arrays: !llvm.ptr, %begin: i32, %count: i32, %own: !llvm.ptr) {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %places = llvm.mlir.addressof @places : !llvm.ptr
  llvm.br ^bb1(%zero : i32)
^bb1(%i: i32):
  %more = llvm.icmp "slt" %i, %count : i32
  llvm.cond_br %more, ^bb2, ^bb3
^bb2:
  %at = llvm.add %begin, %i : i32
  %from = llvm.getelementptr %places[%at] : (!llvm.ptr, i32) -> !llvm.ptr, i32
  %place = llvm.load %from : !llvm.ptr -> i32
  %source = llvm.getelementptr %arrays[%place] : (!llvm.ptr, i32) -> !llvm.ptr, !llvm.ptr
  %array = llvm.load %source : !llvm.ptr -> !llvm.ptr
  %to = llvm.getelementptr %own[%i] : (!llvm.ptr, i32) -> !llvm.ptr, !llvm.ptr
  llvm.store %array, %to : !llvm.ptr, !llvm.ptr
  %next = llvm.add %i, %one : i32
  llvm.br ^bb1(%next : i32)
^bb3:
  llvm.return
}}

llvm.func internal @launch(%module: !llvm.ptr, %name: !llvm.ptr, %grid_x: i32, %grid_y: i32,
    %grid_z: i32, %block: i32, %clustered: i32, %shared: i32, %begins_early: i32,
    %stream: !llvm.ptr, %parameters: !llvm.ptr) {{
  %one = llvm.mlir.constant(1 : i32) : i32
  %one_i64 = llvm.mlir.constant(1 : i64) : i64
  %none = llvm.mlir.zero : !llvm.ptr
  %handle = llvm.alloca %one_i64 x !llvm.ptr : (i64) -> !llvm.ptr
  %found = llvm.call @cuModuleGetFunction(%handle, %module, %name)
    : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.call @check(%found) : (i32) -> ()
  %function = llvm.load %handle : !llvm.ptr -> !llvm.ptr
  %shared_bytes = llvm.mlir.constant({shared_bytes} : i32) : i32
  %allowed = llvm.call @cuFuncSetAttribute(%function, %shared_bytes, %shared)
    : (!llvm.ptr, i32, i32) -> i32
  llvm.call @check(%allowed) : (i32) -> ()

  // Two attributes: the first is for programmatic launches, the second for clusters.
  %programmatic = llvm.mlir.constant({programmatic} : i32) : i32
  %cluster = llvm.mlir.constant({cluster} : i32) : i32
  %attributes = llvm.alloca %one_i64 x !llvm.array<2 x {attribute}> {{alignment = 8 : i64}}
    : (i64) -> !llvm.ptr
  %second = llvm.getelementptr %attributes[1] : {at} {attribute}
  llvm.store %programmatic, %attributes : i32, !llvm.ptr
  %value = llvm.getelementptr %attributes[0, 2] : {at} {attribute}
  llvm.store %one, %value : i32, !llvm.ptr
  llvm.store %cluster, %second : i32, !llvm.ptr
  %cluster_x = llvm.getelementptr %second[0, 2] : {at} {attribute}
  llvm.store %clustered, %cluster_x : i32, !llvm.ptr
  %cluster_y = llvm.getelementptr %second[0, 3] : {at} {attribute}
  llvm.store %one, %cluster_y : i32, !llvm.ptr
  %cluster_z = llvm.getelementptr %second[0, 4] : {at} {attribute}
  llvm.store %one, %cluster_z : i32, !llvm.ptr
  %is_cluster = llvm.icmp "sgt" %clustered, %one : i32
  %clusters = llvm.zext %is_cluster : i1 to i32
  %count = llvm.add %begins_early, %clusters : i32
  %skipped = llvm.sub %one, %begins_early : i32
  %first = llvm.getelementptr %attributes[%skipped] : (!llvm.ptr, i32) -> !llvm.ptr, {attribute}

  %config = llvm.alloca %one_i64 x {config_type} {{alignment = 8 : i64}} : (i64) -> !llvm.ptr
{config}
  %launched = llvm.call @cuLaunchKernelEx(%config, %function, %parameters, %none)
    : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.call @check(%launched) : (i32) -> ()
  llvm.return
}}

gpu.module @kernels {{
  gpu.func @nothing(%arrays: !llvm.ptr) kernel {{
    gpu.return
  }}
}}

func.func @"\\01mosaic_gpu_launch_kernel"(%nothing: !llvm.ptr, %grid_x: i32, %grid_y: i32,
    %grid_z: i32, %cluster_x: i32, %cluster_y: i32, %cluster_z: i32, %block_x: i32,
    %block_y: i32, %block_z: i32, %shared: i32, %uses_pdl: i32, %stream: !llvm.ptr,
    %parameters: !llvm.ptr) {{
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %max_arrays = llvm.mlir.constant({most} : i64) : i64
  %own = llvm.alloca %max_arrays x !llvm.ptr : (i64) -> !llvm.ptr
  %found = llvm.call @cuFuncGetModule(%own, %nothing) : (!llvm.ptr, !llvm.ptr) -> i32
  llvm.call @check(%found) : (i32) -> ()
  %module = llvm.load %own : !llvm.ptr -> !llvm.ptr
  %parameter = llvm.load %parameters : !llvm.ptr -> !llvm.ptr
  %arrays = llvm.load %parameter : !llvm.ptr -> !llvm.ptr
{calls}
  return
}}
{hosts}

func.func @linked_mosaic_gpu(%stream: !llvm.ptr, %arrays: !llvm.ptr)
    attributes {{llvm.emit_c_interface}} {{
  %token = builtin.unrealized_conversion_cast %stream : !llvm.ptr to !gpu.async.token
  %one = arith.constant 1 : index
  %done = gpu.launch_func async [%token] @kernels::@nothing blocks in (%one, %one, %one)
    threads in (%one, %one, %one) args(%arrays : !llvm.ptr)
  return
}}
}}
"""
