"""The custom calls of a lowered module, and their attributes, which may be replaced.

Owns: ``custom_calls``, ``attribute_of`` and ``set_attribute``. Must not know: what is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.interpreters.mlir import ir

CONFIG = "mhlo.backend_config"  # the attributes of a call


def custom_calls(operation: Any, target: str) -> Iterator[Any]:  # of an ir.Operation
    """Every call of ``target`` within an operation."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                named = inner.attributes
                if "call_target_name" in named and named["call_target_name"].value == target:
                    yield inner
                yield from custom_calls(inner, target)


def set_attribute(call: Any, name: str, content: str | bytes) -> None:
    """Give one attribute of a call another content. Within the module's context."""
    config = {each.name: each.attr for each in call.attributes[CONFIG]}
    config[name] = ir.StringAttr.get(content)
    call.attributes[CONFIG] = ir.DictAttr.get(config)


def attribute_of(call: Any, name: str) -> bytes:
    """One attribute of a call, text or bytes."""
    (content,) = (each.attr.value_bytes for each in call.attributes[CONFIG] if each.name == name)
    return content
