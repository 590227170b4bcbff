"""The custom calls of a lowered module, and their attributes, which may be replaced.

Owns: ``within``, ``custom_calls``, ``attribute_of``, ``set_attribute``, ``set_module`` and
``in_place_of``. Must not know: what is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from jax.extend.mlir.dialects import stablehlo
from jax.interpreters.mlir import ir

MOSAIC_CALL = "mosaic_gpu_v2"  # of a kernel in Mosaic
MODULE, HASH = "module", "kernel_hash"  # its attributes: the kernel, and what it is known by
ALIASES = "output_operand_aliases"
CONFIG = "mhlo.backend_config"  # the attributes of a call


def custom_calls(operation: Any, target: str) -> Iterator[Any]:  # of an ir.Operation
    """Every call of ``target`` within an operation."""
    for inner in within(operation):
        named = inner.attributes
        if "call_target_name" in named and named["call_target_name"].value == target:
            yield inner


def within(operation: Any) -> Iterator[Any]:  # of an ir.Operation
    """All operations in its regions, and in theirs."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from within(inner.operation)


def set_attribute(call: Any, name: str, content: str | bytes) -> None:
    """Give one attribute of a call another content. Within the module's context."""
    config = {each.name: each.attr for each in call.attributes[CONFIG]}
    config[name] = ir.StringAttr.get(content)
    call.attributes[CONFIG] = ir.DictAttr.get(config)


def set_module(call: Any, module: bytes) -> None:
    """Give a call of a kernel in Mosaic another kernel. Within the module's context."""
    set_attribute(call, MODULE, module)
    set_attribute(call, HASH, hashlib.sha256(module).digest())


def in_place_of(call: Any) -> dict[int, int]:
    """Results of a call that are operands, changed."""
    found = {}
    for each in call.attributes.get(ALIASES, ()):
        alias = stablehlo.OutputOperandAlias(each)
        found[next(iter(alias.output_tuple_indices), 0)] = alias.operand_index
    return found


def attribute_of(call: Any, name: str) -> bytes:
    """One attribute of a call, text or bytes."""
    (content,) = (each.attr.value_bytes for each in call.attributes[CONFIG] if each.name == name)
    return content
