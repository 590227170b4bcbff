"""Neighbouring Mosaic kernels of a lowered step as one custom call, with overlapping launches.

XLA makes each custom call a child graph of the step's CUDA graph, and a kernel starts when the
previous child graph has ended. Kernels of one child graph may overlap: the next one loads weights
while the previous one still runs (``pallas_kernels.lib.pdl``). So each run of Mosaic calls without
other operations in between is replaced by one call. This is the StableHLO part; ``link_modules``
builds the Mosaic module of such a call, when it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.lib.device import current_device
from pallas_kernels.toolchain.jax_internals import (
    ALIASES,
    HASH,
    LAYOUTS,
    MODULE,
    MOSAIC_CALL,
    aliases_of,
    attribute_of,
    custom_calls,
    ir,
    set_attribute,
    stablehlo,
    within,
)
from pallas_kernels.toolchain.link_modules import LinkedLaunch, linked_hash
from pallas_kernels.toolchain.machine_code import KernelCall

LIVE_OUT = 1 << 30  # time of a read outside the run

type Source = Callable[[bytes], bytes]  # a kernel's module, by its hash


def link_kernels(module: Any, source_of: Source) -> list[KernelCall]:
    """Replace each run of kernels in ``module``'s main function by one call, in place; returns the
    distinct calls.

    ``module`` is an ``ir.Module`` of StableHLO, as ``jax.stages.Lowered.compiler_ir`` gives it.
    """
    with module.context, ir.Location.unknown():
        functions = {
            op.attributes["sym_name"].value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        block = functions["main"].regions[0].blocks[0]
        _inline(block, functions)
        calls_made: dict[bytes, KernelCall] = {}  # by hash; layers share them
        for run in list(_runs(block)):
            _Linked(run).replace(source_of, calls_made)
        _drop_unused(functions)
        return list(calls_made.values())


def _inline(block: ir.Block, functions: dict[str, Any]) -> None:
    """Inline the functions that call kernels."""
    inlined = _with_kernels(functions)
    for call in [each for each in _calls(block) if _callee(each) in inlined]:
        body = functions[_callee(call)].regions[0].blocks[0]
        results = _inline_body(body, list(call.operands), call, functions, inlined)
        for result, value in zip(call.results, results, strict=True):
            result.replace_all_uses_with(value)
        call.erase()


def _with_kernels(functions: dict[str, Any]) -> set[str]:
    """Names of functions that call kernels, directly or through other functions."""
    blocks = {name: function.regions[0].blocks[0] for name, function in functions.items()}
    found = {
        name for name, function in functions.items() if any(custom_calls(function, MOSAIC_CALL))
    }
    while True:
        more = {
            name
            for name, block in blocks.items()
            if name not in found and any(_callee(call) in found for call in _calls(block))
        }
        if not more:
            return found
        found |= more


def _calls(block: ir.Block) -> Iterator[Any]:
    for operation in block.operations:
        if operation.operation.name == "func.call":
            yield operation.operation


def _callee(call: Any) -> str:
    return call.attributes["callee"].value


def _inline_body(
    body: ir.Block,
    arguments: Sequence[ir.Value],
    before: Any,
    functions: dict[str, Any],
    inlined: set[str],
) -> list[ir.Value]:
    """Copy a function's body in front of an operation; returns its results."""
    value_map: dict[ir.Value, ir.Value] = dict(zip(body.arguments, arguments, strict=True))
    for each in body.operations:
        operation = each.operation
        operands = [value_map[x] for x in operation.operands]
        if operation.name == "func.return":
            return operands
        callee = _callee(operation) if operation.name == "func.call" else None
        if callee in inlined:
            inner = functions[callee].regions[0].blocks[0]
            results = _inline_body(inner, operands, before, functions, inlined)
        else:
            with ir.InsertionPoint(before):
                copy = operation.clone()
            for part in (copy.operation, *within(copy.operation)):  # regions may use outer values
                for i, operand in enumerate(part.operands):
                    if operand in value_map:
                        part.operands[i] = value_map[operand]
            results = list(copy.results)
        value_map.update(zip(operation.results, results, strict=True))
    raise ValueError("a function has no return")


def _runs(block: ir.Block) -> Iterator[list[Any]]:
    """Maximal runs of Mosaic calls, with reshapes between them, whose results no other operation
    in between reads.

    A kernel that updates an operand in place which others also read is in no run: XLA copies it.
    """
    run: list[Any] = []
    produced: set[ir.Value] = set()
    for op in block.operations:
        operation = op.operation
        reads = (x for part in (operation, *within(operation)) for x in part.operands)
        needs = any(value in produced for value in reads)
        is_kernel = _is_kernel(operation) and not _writes_shared_operand(operation)
        if is_kernel or (needs and operation.name == "stablehlo.reshape"):
            run.append(operation)
            produced.update(operation.results)
        elif needs or operation.name == "func.return":
            if sum(map(_is_kernel, run)) > 1:
                yield run
            run, produced = [], set()


def _is_kernel(operation: Any) -> bool:
    named = operation.attributes
    return (
        operation.name == "stablehlo.custom_call" and named["call_target_name"].value == MOSAIC_CALL
    )


def _writes_shared_operand(kernel: Any) -> bool:
    written = (kernel.operands[i] for i in aliases_of(kernel).values())
    return any(use.owner.operation != kernel for operand in written for use in operand.uses)


@dataclass
class _Linked:
    """The call that replaces a run of kernels.

    Its operands are the values that the run reads from outside, its results the arrays that it
    writes. Several kernels may write the same result array, one after the other, if each value has
    been read before the next is written.
    """

    run: Sequence[Any]
    inputs: list[ir.Value] = field(default_factory=list)
    outputs: list[ir.Type] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)  # of outputs to inputs
    free_outputs: list[tuple[int, int]] = field(
        default_factory=list
    )  # time of the last read, output
    places: dict[ir.Value, tuple[bool, int]] = field(default_factory=dict)  # (is output, index)

    def replace(self, source_of: Source, calls_made: dict[bytes, KernelCall]) -> None:
        """Replace the run; ``calls_made`` gets its call unless it has that."""
        kernels = [operation for operation in self.run if _is_kernel(operation)]
        last_reads = self._last_reads()
        launched = []
        for time, operation in enumerate(self.run):
            if _is_kernel(operation):
                self._place_results(operation, time, last_reads)
                arrays = [self._place(x) for x in (*operation.operands, *operation.results)]
                launched.append((source_of(attribute_of(operation, HASH)), arrays))
            else:
                self.places[operation.results[0]] = self._place(operation.operands[0])
        first_output = len(self.inputs)
        launches = tuple(
            LinkedLaunch(source, tuple(i + first_output * is_output for is_output, i in arrays))
            for source, arrays in launched
        )
        name = linked_hash(launches)
        call = self._call(kernels[-1], name)
        self._replace_by(call, kernels[-1])
        if name not in calls_made:
            calls_made[name] = KernelCall.of(call, "linked kernels", current_device(), launches)

    def _last_reads(self) -> dict[ir.Value, int]:
        """The time of each value's last read, including reads of its reshapes."""
        last: dict[ir.Value, int] = {}
        inside = {operation: time for time, operation in enumerate(self.run)}
        for operation in reversed(self.run):
            for value in operation.results:
                times = [-1]
                for use in value.uses:
                    user = use.owner.operation
                    if user not in inside:
                        times.append(LIVE_OUT)
                    elif _is_kernel(user):
                        times.append(inside[user])
                    else:
                        times.append(last[user.results[0]])
                last[value] = max(times)
        return last

    def _place(self, value: ir.Value) -> tuple[bool, int]:
        if value not in self.places:
            self.places[value] = False, len(self.inputs)
            self.inputs.append(value)
        return self.places[value]

    def _place_results(self, kernel: Any, time: int, last_reads: dict[ir.Value, int]) -> None:
        """Choose where a kernel writes: the aliased operand, a free output, or a new one."""
        in_place = aliases_of(kernel)
        for i, result in enumerate(kernel.results):
            if i in in_place:
                is_output, place = self._place(kernel.operands[in_place[i]])
                if not is_output:
                    self.aliases[len(self.outputs)] = place
                    self.outputs.append(result.type)
                    place = len(self.outputs) - 1
                self.places[result] = True, place
                continue
            fitting = [
                (read, place)
                for read, place in self.free_outputs
                if read < time and self.outputs[place] == result.type
            ]
            if fitting:
                self.free_outputs.remove(fitting[0])
                place = fitting[0][1]
            else:
                place = len(self.outputs)
                self.outputs.append(result.type)
            self.places[result] = True, place
            self.free_outputs.append((max(last_reads[result], time), place))

    def _call(self, like: Any, kernel: bytes) -> Any:
        attributes = {name: like.attributes[name] for name in like.attributes}
        for name, types in zip(LAYOUTS, ([x.type for x in self.inputs], self.outputs), strict=True):
            attributes[name] = ir.ArrayAttr.get([_row_major(each) for each in types])
        several = len(self.outputs) > 1
        attributes[ALIASES] = ir.ArrayAttr.get(
            [
                stablehlo.OutputOperandAlias.get([output] if several else [], operand, [])
                for output, operand in self.aliases.items()
            ]
        )
        with ir.InsertionPoint(like):
            call = ir.Operation.create(like.name, self.outputs, self.inputs, attributes)
        set_attribute(call, MODULE, "")
        set_attribute(call, HASH, kernel)
        return call

    def _replace_by(self, call: Any, behind: Any) -> None:
        with ir.InsertionPoint(behind):
            for operation in self.run:
                for result in operation.results:
                    _, place = self.places[result]
                    value = call.results[place]
                    if value.type != result.type:
                        reshaped = ir.Operation.create("stablehlo.reshape", [result.type], [value])
                        value = reshaped.results[0]
                    result.replace_all_uses_with(value)
        for operation in reversed(self.run):
            operation.erase()


def _row_major(kind: Any) -> ir.Attribute:
    order = list(reversed(range(ir.RankedTensorType(kind).rank)))
    return ir.Attribute.parse(f"dense<{order}> : tensor<{len(order)}xindex>")


def _drop_unused(functions: dict[str, Any]) -> None:
    """Remove functions that are no longer called."""
    while True:
        inside = (each for function in functions.values() for each in within(function))
        called = {_callee(each) for each in inside if each.name == "func.call"}
        unused = [name for name in functions if name != "main" and name not in called]
        if not unused:
            return
        for name in unused:
            functions.pop(name).erase()
