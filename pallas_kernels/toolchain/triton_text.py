"""Drops Triton's IR from the calls of its kernels; it is not used at run time.

An executable holds the attributes of a call once for each layer, several times over: 87 of the
152 KB of ``append_decode`` are that text, and jax-triton has no option to leave it out.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

from pallas_kernels.toolchain.jax_internals import (
    OPAQUE,
    TRITON_CALL,
    attribute_of,
    custom_calls,
    set_attribute,
)

# Field numbers of jaxlib/gpu/triton.proto.
KERNEL = (1, 1)  # TritonAnyKernelCall.kernel_call, TritonKernelCall.kernel
TEXT = 5  # TritonKernel.ttir
VARINT, BYTES = 0, 2  # protobuf's wire types


def drop_triton_text(module: Any) -> None:  # ir.Module
    """Remove the text from every call in a lowered module, before it is compiled."""
    with module.context:
        for call in custom_calls(module.operation, TRITON_CALL):
            set_attribute(call, OPAQUE, _shortened(attribute_of(call, OPAQUE)))


@cache
def _shortened(opaque: bytes) -> bytes:
    return zlib.compress(_without(zlib.decompress(opaque), (*KERNEL, TEXT)))


def _without(message: bytes, path: tuple[int, ...]) -> bytes:
    """A message without the field at the end of a path of field numbers."""
    kept, at = bytearray(), 0
    while at < len(message):
        begin = at
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            _, at = _varint(message, at)
        elif wire == BYTES:
            size, at = _varint(message, at)
            content, at = message[at : at + size], at + size
            if number == path[0] and len(path) == 1:
                continue
            if number == path[0]:
                inner = _without(content, path[1:])
                kept += _as_varint(tag) + _as_varint(len(inner)) + inner
                continue
        else:
            at += 8 if wire == 1 else 4
        kept += message[begin:at]
    return bytes(kept)


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number at an offset, and the offset behind it."""
    number = shift = 0
    while True:
        byte, at = message[at], at + 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at


def _as_varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))
