"""Several Mosaic kernels as one Mosaic module, which launches them in order.

Mosaic compiles a module with one ``gpu.launch``: host code that makes TMA descriptors, and the
kernel's body. Here the bodies become kernels of one ``gpu.module``, each source once, and the host
code of each becomes a function that ends with its launch. Mosaic itself launches only an empty
kernel. For that it calls ``mosaic_gpu_launch_kernel``, which resolves to the function of that name
in this module, and that runs the host code of every launch in order. (Its name begins with the byte
1, by which LLVM takes a name as it is; without it the module would define the name twice.) The
handles of the other kernels come from the CUDA module of the empty one.

Written for the modules of jaxlib 0.11 (``jaxlib/mosaic/gpu``: launch_lowering.cc, passes.cc).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels.toolchain.jax_internals import (
    USES_PDL,
    WAIT,
    ir,
    mosaic_bytecode,
    mosaic_context,
    mosaic_serde,
)
from pallas_kernels.toolchain.link_host import HostLaunch, host_module

type Value = Any  # an ir.Value that an operation made
type Attributes = dict[str, Any]


class LinkedLaunch(NamedTuple):
    """One kernel of a linked call: its Mosaic module, and for each of its arrays the index of that
    array among the call's.
    """

    source: bytes
    arrays: tuple[int, ...]


def linked_hash(launches: Sequence[LinkedLaunch]) -> bytes:
    """The key of a linked call in Mosaic's cache: a hash of what ``linked_module`` makes it of.

    So a step can refer to the module before a worker has made it, which takes 0.1 s.
    """
    found = hashlib.sha256()
    for source, arrays in launches:
        found.update(hashlib.sha256(source).digest() + repr(arrays).encode())
    return found.digest()


def linked_module(launches: Sequence[LinkedLaunch]) -> bytes:
    """The module of all launches, in order, as Mosaic compiles it.

    Each except the first may start before the previous one has ended, if its kernel waits for that
    (``pallas_kernels.lib.pdl``).
    """
    with mosaic_context():
        sources = dict.fromkeys(launch.source for launch in launches)
        kernels = {source: _Kernel(source, i) for i, source in enumerate(sources)}
        module = ir.Module.parse(
            host_module([_host_launch(i, launch, kernels) for i, launch in enumerate(launches)])
        )
        for kernel in kernels.values():
            kernel.move_to(module)
        module.operation.verify()
        mosaic_serde(module, serialize=True)
        return mosaic_bytecode(module)


def _host_launch(i: int, launch: LinkedLaunch, kernels: dict[bytes, _Kernel]) -> HostLaunch:
    kernel = kernels[launch.source]
    early = i > 0 and kernel.waits
    return HostLaunch(kernel.number, kernel.name, launch.arrays, begins_early=early)


def unlinked_module(source: bytes) -> bytes:
    """A kernel's module for a call of its own: launched without a programmatic edge."""
    with mosaic_context():
        module = ir.Module.parse(source)
        if USES_PDL not in module.operation.attributes:
            return source
        del module.operation.attributes[USES_PDL]
        return mosaic_bytecode(module)


class _Kernel:
    """A module of one kernel, whose body and host code are moved to the linked module."""

    def __init__(self, source: bytes, number: int) -> None:
        self._module = ir.Module.parse(source)  # keeps its operations alive
        mosaic_serde(self._module, serialize=False)
        self.number = number
        functions = (op.operation for op in self._module.body.operations)
        hosts = [op for op in functions if op.name == "func.func"]
        (host,) = (op for op in hosts if len(op.regions[0].blocks))  # the others are declarations
        self._host = host.regions[0].blocks[0]
        # such as skinny_gemm_mosaic_gpu_2: profilers show it
        self.name = f"{ir.StringAttr(host.attributes['sym_name']).value}_{number}"
        operations = (op.operation for op in self._host.operations)
        (self._launch,) = (op for op in operations if op.name == "gpu.launch")
        self.waits = WAIT.encode() in source  # a body has tens of thousands of operations

    def move_to(self, target: ir.Module) -> None:
        """Move the body to ``target``'s kernels, and the host code to its function known."""
        symbols = ir.SymbolTable(target.operation)
        sizes = self._sizes()
        taken = self._move_body(symbols["kernels"].regions[0].blocks[0], sizes)
        self._move_host(symbols[f"host{self.number}"].regions[0].blocks[0], taken, sizes)

    def _sizes(self) -> dict[str, list[int]]:
        """The sizes of the launch, which are constants."""
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

    def _move_body(self, kernels: ir.Block, sizes: dict[str, list[int]]) -> list[Value]:
        """Returns the kernel's parameters: the values that the host code loads, arrays and TMA
        descriptors. The other values that the body uses are computed from these in the kernel.
        """
        body = self._launch.regions[0].blocks[0]
        uses = self._uses_from_outside()
        taken: list[Value] = []
        for value in uses:
            _find_loaded(value, taken)
        types = [value.type for value in taken]
        integer = ir.IntegerType.get_signless(64)
        attributes = {
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [])),
            "sym_name": ir.StringAttr.get(self.name),
            "gpu.kernel": ir.UnitAttr.get(),
            "known_block_size": ir.DenseI32ArrayAttr.get(sizes["block"]),
            "known_grid_size": ir.DenseI32ArrayAttr.get(sizes["grid"]),
            "workgroup_attributions": ir.IntegerAttr.get(integer, 0),
        }
        with ir.InsertionPoint(kernels):
            function = ir.Operation.create("gpu.func", attributes=attributes, regions=1)
        block = ir.Block.create_at_start(function.regions[0], types)
        known: dict[Value, Value] = dict(zip(taken, block.arguments, strict=True))
        for value in uses:
            _recompute(value, block, known)
        with ir.InsertionPoint(block):
            end = ir.Operation.create("gpu.return")
        for operation in list(body.operations):
            if operation.operation.name != "gpu.terminator":
                operation.operation.move_before(end)
        for value, users in uses.items():
            for operation, i in users:
                operation.operands[i] = known[value]
        return taken

    def _uses_from_outside(self) -> dict[Value, list[tuple[Any, int]]]:
        """The host code's values that the body uses, with those uses. Found from the host code's
        few values, since the body has tens of thousands of operations.
        """
        made = [value for op in self._host.operations for value in op.operation.results]
        found: dict[Value, list[tuple[Any, int]]] = {}
        for value in (*self._host.arguments, *made):
            users = [(use.owner.operation, use.operand_number) for use in value.uses]
            if inside := [user for user in users if self._is_in_body(user[0])]:
                found[value] = inside
        return found

    def _is_in_body(self, operation: Any) -> bool:
        while (parent := operation.parent) is not None:
            if parent == self._launch:
                return True
            operation = parent
        return False

    def _move_host(self, to: ir.Block, taken: list[Value], sizes: dict[str, list[int]]) -> None:
        """Move the operations before the launch, and launch the kernel."""
        module, stream, arrays, begins_early = to.arguments
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
            name = _create("llvm.mlir.addressof", "!llvm.ptr", global_name=f"name{self.number}")
            numbers = [*sizes["grid"], sizes["block"][0], sizes["cluster"][0], *sizes["shared"]]
            constants = [_constant(number, 32) for number in numbers]
            arguments = [module, name, *constants, begins_early, stream, parameters]
            ir.Operation.create(
                "llvm.call",
                operands=arguments,
                attributes={
                    "callee": ir.FlatSymbolRefAttr.get("launch"),
                    "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(arguments), 0]),
                    "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
                },
            )


def _find_loaded(value: Value, found: list[Value]) -> None:
    if value.owner.name == "llvm.load":
        if value not in found:
            found.append(value)
        return
    for operand in value.owner.operands:
        _find_loaded(operand, found)


def _recompute(value: Value, block: ir.Block, known: dict[Value, Value]) -> None:
    """Compute ``value`` at the end of a block from known values, by copies of its operations."""
    if value in known:
        return
    producer = value.owner
    for operand in producer.operands:
        _recompute(operand, block, known)
    with ir.InsertionPoint(block):
        copy = producer.clone()
    for i, operand in enumerate(producer.operands):
        copy.operands[i] = known[operand]
    known.update(zip(producer.results, copy.results, strict=True))


def _create(name: str, kind: str, *operands: Value, **symbols: str) -> Value:
    attributes: Attributes = {key: ir.FlatSymbolRefAttr.get(x) for key, x in symbols.items()}
    results = [ir.Type.parse(kind)]
    return ir.Operation.create(name, results, list(operands), attributes).results[0]


def _number(value: Value) -> int:
    return ir.IntegerAttr(value.owner.attributes["value"]).value


def _constant(number: int, bits: int) -> Value:
    kind = ir.IntegerType.get_signless(bits)
    attributes: Attributes = {"value": ir.IntegerAttr.get(kind, number)}
    return ir.Operation.create("llvm.mlir.constant", [kind], attributes=attributes).results[0]


def _array_of(addresses: Sequence[Value]) -> Value:
    """An array of pointers on the host's stack."""
    pointer = ir.Type.parse("!llvm.ptr")
    element: Attributes = {"elem_type": ir.TypeAttr.get(pointer)}
    array = ir.Operation.create(
        "llvm.alloca", [pointer], [_constant(len(addresses), 64)], element
    ).results[0]
    for i, address in enumerate(addresses):
        at = {**element, "rawConstantIndices": ir.DenseI32ArrayAttr.get([i])}
        to = ir.Operation.create("llvm.getelementptr", [pointer], [array], at).results[0]
        ir.Operation.create("llvm.store", operands=[address, to])
    return array
