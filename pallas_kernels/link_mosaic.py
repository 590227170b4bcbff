"""Several kernels in Mosaic as one module, which launches them one after the other.

Mosaic's compiler takes a module with one ``gpu.launch``: host code that describes arrays to TMA,
and the kernel's body. Here the bodies become kernels of one ``gpu.module``, each source once, and
the host code of each a function that ends with a launch of its own. What Mosaic launches itself is
a kernel that does nothing. For that it calls ``mosaic_gpu_launch_kernel``, which resolves to the
function of that name in here, and this one runs the host code of every launch in turn. (The byte 1
that its name begins with is LLVM's mark for a name to be taken as it is; without it the module
would have two functions of one name.) Handles of the other kernels come from the module of the
first.

Owns: ``Launch``, ``linked_module`` and ``unlinked_module``. Must not know: StableHLO, which calls
are neighbours. Made for the modules of jaxlib 0.11 (``jaxlib/mosaic/gpu``: launch_lowering.cc,
passes.cc).
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jax.interpreters.mlir import ir, make_ir_context
from jaxlib.mlir.passmanager import PassManager

from pallas_kernels.linked import WAIT

USES_PDL = "mosaic_gpu.uses_pdl"  # mark of a module whose kernel may begin early
# cuda.h: of CUlaunchAttributeID and CUfunction_attribute
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


class Launch(NamedTuple):
    """One kernel of several: its module as Mosaic was to get it, and for each of its arrays which
    of the linked call's arrays that is.
    """

    source: bytes
    arrays: tuple[int, ...]


def linked_module(launches: Sequence[Launch]) -> bytes:
    """The module of all launches, in order, as Mosaic takes it.

    Each but the first may begin before the one ahead of it has ended, if it waits for that by
    itself (``pallas_kernels.linked``).
    """
    with _mosaic_context():
        sources = dict.fromkeys(launch.source for launch in launches)
        kernels = {source: _Kernel(source, i) for i, source in enumerate(sources)}
        module = ir.Module.parse(_outline(launches, kernels))
        for kernel in kernels.values():
            kernel.move_to(module)
        module.operation.verify()
        _serde(module, serialize=True)
        return _bytecode(module)


def unlinked_module(source: bytes) -> bytes:
    """A kernel's module for when it is linked with none: launched as any other, whatever is ahead
    of it.
    """
    with _mosaic_context():
        module = ir.Module.parse(source)
        if USES_PDL not in module.operation.attributes:
            return source
        del module.operation.attributes[USES_PDL]
        return _bytecode(module)


@contextmanager
def _mosaic_context() -> Generator[None]:
    from jax.experimental.mosaic import gpu as mosaic  # 0.2 s, which a start from a bundle saves

    with make_ir_context() as context, ir.Location.unknown():
        mosaic.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        yield


def _bytecode(module: ir.Module) -> bytes:
    out = io.BytesIO()
    module.operation.write_bytecode(out, desired_version=0)
    return out.getvalue()


def _serde(module: ir.Module, *, serialize: bool) -> None:
    """From Mosaic's stable form of a module, or back to it; in place."""
    switch = "true" if serialize else "false"
    PassManager.parse(f"builtin.module(mosaic_gpu-serde{{serialize={switch}}})").run(
        module.operation
    )


def _outline(launches: Sequence[Launch], kernels: dict[bytes, _Kernel]) -> str:
    """The module, in which kernels and their host code are still to be filled in."""
    names, hosts, calls, places = [], [], [], []
    for number in range(len(kernels)):
        names.append(f'llvm.mlir.global internal constant @name{number}("k{number}\\00")')
        hosts.append(
            f"func.func private @host{number}(%module: !llvm.ptr, %stream: !llvm.ptr, "
            "%arrays: !llvm.ptr, %is_linked: i32) { return }"
        )
    for i, launch in enumerate(launches):
        kernel = kernels[launch.source]
        is_linked = "%one" if i > 0 and kernel.waits else "%zero"
        calls.append(
            f"%begin{i} = llvm.mlir.constant({len(places)} : i32) : i32\n"
            f"%count{i} = llvm.mlir.constant({len(launch.arrays)} : i32) : i32\n"
            f"llvm.call @gather(%arrays, %begin{i}, %count{i}, %own) : "
            "(!llvm.ptr, i32, i32, !llvm.ptr) -> ()\n"
            f"func.call @host{kernel.number}(%module, %stream, %own, {is_linked}) : "
            "(!llvm.ptr, !llvm.ptr, !llvm.ptr, i32) -> ()"
        )
        places.extend(launch.arrays)
    config = []
    for i, (name, kind) in enumerate(CONFIG_FIELDS):
        config.append(f"%at{i} = llvm.getelementptr %config[0, {i}] : {_AT} {CONFIG}")
        config.append(f"llvm.store %{name}, %at{i} : {kind}, !llvm.ptr")
    return _OUTLINE.format(
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
_OUTLINE = """
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

// As Mosaic does when CUDA refuses a launch.
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
    %grid_z: i32, %block: i32, %clustered: i32, %shared: i32, %is_linked: i32,
    %stream: !llvm.ptr, %parameters: !llvm.ptr) {{
  %one = llvm.mlir.constant(1 : i32) : i32
  %room = llvm.mlir.constant(1 : i64) : i64
  %none = llvm.mlir.zero : !llvm.ptr
  %handle = llvm.alloca %room x !llvm.ptr : (i64) -> !llvm.ptr
  %found = llvm.call @cuModuleGetFunction(%handle, %module, %name)
    : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.call @check(%found) : (i32) -> ()
  %function = llvm.load %handle : !llvm.ptr -> !llvm.ptr
  %shared_bytes = llvm.mlir.constant({shared_bytes} : i32) : i32
  %allowed = llvm.call @cuFuncSetAttribute(%function, %shared_bytes, %shared)
    : (!llvm.ptr, i32, i32) -> i32
  llvm.call @check(%allowed) : (i32) -> ()

  // Two attributes, of which the first is for linked kernels and the second for clusters.
  %programmatic = llvm.mlir.constant({programmatic} : i32) : i32
  %cluster = llvm.mlir.constant({cluster} : i32) : i32
  %attributes = llvm.alloca %room x !llvm.array<2 x {attribute}> {{alignment = 8 : i64}}
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
  %count = llvm.add %is_linked, %clusters : i32
  %skipped = llvm.sub %one, %is_linked : i32
  %first = llvm.getelementptr %attributes[%skipped] : (!llvm.ptr, i32) -> !llvm.ptr, {attribute}

  %config = llvm.alloca %room x {config_type} {{alignment = 8 : i64}} : (i64) -> !llvm.ptr
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
  %room = llvm.mlir.constant({most} : i64) : i64
  %own = llvm.alloca %room x !llvm.ptr : (i64) -> !llvm.ptr
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


class _Kernel:
    """A module of one kernel, to be taken apart."""

    def __init__(self, source: bytes, number: int) -> None:
        self._module = ir.Module.parse(source)  # keeps what is in it alive
        _serde(self._module, serialize=False)
        self.number = number
        inside = list(_within(self._module.operation))
        (self._launch,) = (operation for operation in inside if operation.name == "gpu.launch")
        self._host = self._launch.parent.regions[0].blocks[0]
        assembly = (op.attributes["asm_string"] for op in inside if op.name == "llvm.inline_asm")
        self.waits = any(text.value.startswith(WAIT) for text in assembly)

    def move_to(self, target: ir.Module) -> None:
        """The body to ``target``'s kernels, the host code to its place there."""
        symbols = ir.SymbolTable(target.operation)
        sizes = self._sizes()
        taken = self._move_body(symbols["kernels"].regions[0].blocks[0], sizes)
        self._move_host(symbols[f"host{self.number}"].regions[0].blocks[0], taken, sizes)

    def _sizes(self) -> dict[str, list[int]]:
        """Constants of the launch by what they are."""
        operands, counts = iter(self._launch.operands), self._launch.attributes
        groups = [
            [next(operands) for _ in range(count)]
            for count in ir.DenseI32ArrayAttr(counts["operandSegmentSizes"])
        ]
        sizes = [_number(group[0]) if group else 1 for group in groups[1:10]]
        shared = [_number(x) for x in groups[10]] or [0]
        found = {"grid": sizes[:3], "block": sizes[3:6], "cluster": sizes[6:], "shared": shared}
        if found["block"][1:] != [1, 1] or found["cluster"][1:] != [1, 1]:
            raise ValueError(f"a kernel has blocks or clusters of more than one dimension: {found}")
        return found

    def _move_body(self, kernels: ir.Block, sizes: dict[str, list[int]]) -> list[ir.Value]:
        """What the kernel takes: values that the host has loaded, arrays and TMA's descriptors.

        All else that the body uses is made from these by operations that follow it there.
        """
        body = self._launch.regions[0].blocks[0]
        outside = _used_from_outside(self._launch)
        taken: list[ir.Value] = []
        for value in outside:
            _find_loaded(value, taken)
        types = [value.type for value in taken]
        integer = ir.IntegerType.get_signless(64)
        attributes = {
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [])),
            "sym_name": ir.StringAttr.get(f"k{self.number}"),
            "gpu.kernel": ir.UnitAttr.get(),
            "known_block_size": ir.DenseI32ArrayAttr.get(sizes["block"]),
            "known_grid_size": ir.DenseI32ArrayAttr.get(sizes["grid"]),
            "workgroup_attributions": ir.IntegerAttr.get(integer, 0),
        }
        with ir.InsertionPoint(kernels):
            function = ir.Operation.create("gpu.func", attributes=attributes, regions=1)
        block = ir.Block.create_at_start(function.regions[0], types)
        there: dict[ir.Value, ir.Value] = dict(zip(taken, block.arguments, strict=True))
        for value in outside:
            _make_again(value, block, there)
        with ir.InsertionPoint(block):
            end = ir.Operation.create("gpu.return")
        for operation in list(body.operations):
            if operation.operation.name != "gpu.terminator":
                operation.operation.move_before(end)
        for operation in _within(function):
            for i, operand in enumerate(operation.operands):
                if operand in there:
                    operation.operands[i] = there[operand]
        return taken

    def _move_host(self, to: ir.Block, taken: list[ir.Value], sizes: dict[str, list[int]]) -> None:
        """All until the launch, and a launch of what has just been made a kernel."""
        module, stream, arrays, is_linked = to.arguments
        end = to.operations[len(to.operations) - 1]
        for operation in list(self._host.operations):
            if operation.operation.name not in ("gpu.launch", "func.return"):
                operation.operation.move_before(end.operation)
        own_stream, own_arrays = self._host.arguments
        own_stream.replace_all_uses_with(stream)
        own_arrays.replace_all_uses_with(arrays)
        self._launch.erase()
        for operation in list(to.operations):
            if "!gpu.async.token" in map(str, operation.operation.results.types):
                operation.operation.erase()
        with ir.InsertionPoint(end):
            parameters = _array_of([value.owner.operands[0] for value in taken])
            name = _made("llvm.mlir.addressof", "!llvm.ptr", global_name=f"name{self.number}")
            numbers = [*sizes["grid"], sizes["block"][0], sizes["cluster"][0], *sizes["shared"]]
            constants = [_constant(number, 32) for number in numbers]
            arguments = [module, name, *constants, is_linked, stream, parameters]
            ir.Operation.create(
                "llvm.call",
                operands=arguments,
                attributes={
                    "callee": ir.FlatSymbolRefAttr.get("launch"),
                    "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(arguments), 0]),
                    "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
                },
            )


def _within(operation: Any) -> Iterator[Any]:  # of an ir.Operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _within(inner.operation)


def _used_from_outside(launch: Any) -> list[ir.Value]:
    inside: set[ir.Value] = set()
    for operation in _within(launch):
        inside.update(operation.results)
        for region in operation.regions:
            for block in region.blocks:
                inside.update(block.arguments)
    used = (operand for operation in _within(launch) for operand in operation.operands)
    return list(dict.fromkeys(value for value in used if value not in inside))


def _find_loaded(value: ir.Value, found: list[ir.Value]) -> None:
    if value.owner.name == "llvm.load":
        if value not in found:
            found.append(value)
        return
    for operand in value.owner.operands:
        _find_loaded(operand, found)


def _make_again(value: ir.Value, block: ir.Block, there: dict[ir.Value, ir.Value]) -> None:
    """Have ``value`` in ``there``, by copies at the end of a block of what it is made from."""
    if value in there:
        return
    maker = value.owner
    for operand in maker.operands:
        _make_again(operand, block, there)
    with ir.InsertionPoint(block):
        copy = maker.clone()
    for i, operand in enumerate(maker.operands):
        copy.operands[i] = there[operand]
    there.update(zip(maker.results, copy.results, strict=True))


def _made(name: str, kind: str, *operands: ir.Value, **symbols: str) -> ir.Value:
    attributes = {key: ir.FlatSymbolRefAttr.get(symbol) for key, symbol in symbols.items()}
    results = [ir.Type.parse(kind)]
    return ir.Operation.create(name, results, list(operands), attributes).results[0]


def _number(value: ir.Value) -> int:
    return ir.IntegerAttr(value.owner.attributes["value"]).value


def _constant(number: int, bits: int) -> ir.Value:
    kind = ir.IntegerType.get_signless(bits)
    attributes = {"value": ir.IntegerAttr.get(kind, number)}
    return ir.Operation.create("llvm.mlir.constant", [kind], attributes=attributes).results[0]


def _array_of(addresses: Sequence[ir.Value]) -> ir.Value:
    """An array of pointers on the host's stack."""
    pointer = ir.Type.parse("!llvm.ptr")
    element = {"elem_type": ir.TypeAttr.get(pointer)}
    room = ir.Operation.create(
        "llvm.alloca", [pointer], [_constant(len(addresses), 64)], element
    ).results[0]
    for i, address in enumerate(addresses):
        at = {**element, "rawConstantIndices": ir.DenseI32ArrayAttr.get([i])}
        to = ir.Operation.create("llvm.getelementptr", [pointer], [room], at).results[0]
        ir.Operation.create("llvm.store", operands=[address, to])
    return room
