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

import importlib
import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jax.interpreters.mlir import ir, make_ir_context

from pallas_kernels.link_outline import Placed, outline

WAIT = "griddepcontrol.wait"  # what ``linked.await_kernel_before`` is in a module
USES_PDL = "mosaic_gpu.uses_pdl"  # mark of a module whose kernel may begin early


type Value = Any  # an ir.Value that an operation made
type Attributes = dict[str, Any]


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
        placed = [_placed(i, launch, kernels) for i, launch in enumerate(launches)]
        module = ir.Module.parse(outline(placed))
        for kernel in kernels.values():
            kernel.move_to(module)
        module.operation.verify()
        _serde(module, serialize=True)
        return _bytecode(module)


def _placed(i: int, launch: Launch, kernels: dict[bytes, _Kernel]) -> Placed:
    kernel = kernels[launch.source]
    return Placed(kernel.number, launch.arrays, begins_early=i > 0 and kernel.waits)


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
    with make_ir_context() as context, ir.Location.unknown():
        _mosaic().dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        yield


def _mosaic() -> Any:
    """Where JAX makes modules for Mosaic: 0.2 s to import, which a start from a bundle saves."""
    return importlib.import_module("jax.experimental.mosaic.gpu.core")


def _bytecode(module: ir.Module) -> bytes:
    out = io.BytesIO()
    module.operation.write_bytecode(out, desired_version=0)
    return out.getvalue()


def _serde(module: ir.Module, *, serialize: bool) -> None:
    """From Mosaic's stable form of a module, or back to it; in place."""
    switch = "true" if serialize else "false"
    passes = f"builtin.module(mosaic_gpu-serde{{serialize={switch}}})"
    _mosaic().passmanager.PassManager.parse(passes).run(module.operation)


class _Kernel:
    """A module of one kernel, to be taken apart."""

    def __init__(self, source: bytes, number: int) -> None:
        self._module = ir.Module.parse(source)  # keeps what is in it alive
        _serde(self._module, serialize=False)
        self.number = number
        functions = (op.operation for op in self._module.body.operations)
        hosts = [op.regions[0].blocks for op in functions if op.name == "func.func"]
        (self._host,) = (blocks[0] for blocks in hosts if len(blocks))  # others are declared
        operations = (op.operation for op in self._host.operations)
        (self._launch,) = (op for op in operations if op.name == "gpu.launch")
        self.waits = WAIT.encode() in source  # a body has tens of thousands of operations

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

    def _move_body(self, kernels: ir.Block, sizes: dict[str, list[int]]) -> list[Value]:
        """What the kernel takes: values that the host has loaded, arrays and TMA's descriptors.

        All else that the body uses is made from these by operations that follow it there.
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
            "sym_name": ir.StringAttr.get(f"k{self.number}"),
            "gpu.kernel": ir.UnitAttr.get(),
            "known_block_size": ir.DenseI32ArrayAttr.get(sizes["block"]),
            "known_grid_size": ir.DenseI32ArrayAttr.get(sizes["grid"]),
            "workgroup_attributions": ir.IntegerAttr.get(integer, 0),
        }
        with ir.InsertionPoint(kernels):
            function = ir.Operation.create("gpu.func", attributes=attributes, regions=1)
        block = ir.Block.create_at_start(function.regions[0], types)
        there: dict[Value, Value] = dict(zip(taken, block.arguments, strict=True))
        for value in uses:
            _make_again(value, block, there)
        with ir.InsertionPoint(block):
            end = ir.Operation.create("gpu.return")
        for operation in list(body.operations):
            if operation.operation.name != "gpu.terminator":
                operation.operation.move_before(end)
        for value, users in uses.items():
            for operation, i in users:
                operation.operands[i] = there[value]
        return taken

    def _uses_from_outside(self) -> dict[Value, list[tuple[Any, int]]]:
        """What the host has made that the body uses, and where. Asked of the host's few values: the
        body is long, and all steps' kernels wait for this.
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
        """All until the launch, and a launch of what has just been made a kernel."""
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
            name = _made("llvm.mlir.addressof", "!llvm.ptr", global_name=f"name{self.number}")
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


def _make_again(value: Value, block: ir.Block, there: dict[Value, Value]) -> None:
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


def _made(name: str, kind: str, *operands: Value, **symbols: str) -> Value:
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
    room = ir.Operation.create(
        "llvm.alloca", [pointer], [_constant(len(addresses), 64)], element
    ).results[0]
    for i, address in enumerate(addresses):
        at = {**element, "rawConstantIndices": ir.DenseI32ArrayAttr.get([i])}
        to = ir.Operation.create("llvm.getelementptr", [pointer], [room], at).results[0]
        ir.Operation.create("llvm.store", operands=[address, to])
    return room
