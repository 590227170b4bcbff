"""The header of a GGUF file: its metadata and where each tensor lies.

Owns: parsing, and checking that the file is long enough for the tensors of its header.

The ``gguf`` package reads headers too, but makes a numpy view per vocabulary string, which takes
seconds. This reader takes 0.1 s, so it needs no cache.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.shapes import round_up
from jaxinfer.weights.gguf.types import BLOCK_SIZES, TensorType, ValueType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        ValueType.UINT8: struct.Struct("<B"),
        ValueType.INT8: struct.Struct("<b"),
        ValueType.UINT16: struct.Struct("<H"),
        ValueType.INT16: struct.Struct("<h"),
        ValueType.UINT32: struct.Struct("<I"),
        ValueType.INT32: struct.Struct("<i"),
        ValueType.FLOAT32: struct.Struct("<f"),
        ValueType.BOOL: struct.Struct("<?"),
        ValueType.UINT64: struct.Struct("<Q"),
        ValueType.INT64: struct.Struct("<q"),
        ValueType.FLOAT64: struct.Struct("<d"),
    }
)


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as stored: ``shape`` has the row length last, ``offset`` is in bytes of the file."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The part of a GGUF file before its data; ``digest`` is the SHA-256 of those bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    digest: str


def read_header(path: Path) -> GGUFHeader:
    """Parse and check a header.

    Raises ``CheckpointError`` for a file that is not GGUF, has an unknown version or tensor type,
    or ends before its header or its last tensor does.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise CheckpointError(
                    f"{path} is not a GGUF file; give a .gguf file or a Hugging Face folder"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); check the file") from error
    except struct.error as error:
        raise CheckpointError(f"{path} ends inside its header; download it again") from error
    except (ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{path} has a corrupt header ({error}); download it again"
        ) from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(data, len(_MAGIC))
    version = cursor.scalar(ValueType.UINT32)
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) are supported, "
            "convert the model again"
        )
    num_tensors = cursor.scalar(ValueType.UINT64)
    num_keys = cursor.scalar(ValueType.UINT64)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata key {key} is there twice")
        metadata[key] = cursor.value(cursor.scalar(ValueType.UINT32))
    entries = [_tensor_entry(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data_start = round_up(cursor.position, alignment)
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        tensor = GGUFTensor(shape, kind, data_start + offset, _stored_bytes(name, shape, kind))
        if tensor.offset + tensor.nbytes > len(data):
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {tensor.offset + tensor.nbytes} "
                f"of {len(data)}; download it again"
            )
        tensors[name] = tensor
    digest = hashlib.sha256(memoryview(data)[: cursor.position]).hexdigest()
    return GGUFHeader(path, metadata, tensors, digest)


def _tensor_entry(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.string()
    num_dims = cursor.scalar(ValueType.UINT32)
    dims = [cursor.scalar(ValueType.UINT64) for _ in range(num_dims)]  # row length first
    number = cursor.scalar(ValueType.UINT32)
    if number not in TensorType:
        # imported here as it imports JAX, which headers of tokenizers do not need
        from jaxinfer.weights.gguf.dequantise import check_type

        check_type(path, name, number)
    return name, tuple(reversed(dims)), TensorType(number), cursor.scalar(ValueType.UINT64)


def _stored_bytes(name: str, shape: tuple[int, ...], kind: TensorType) -> int:
    values_per_unit, bytes_per_unit = BLOCK_SIZES[kind]
    if not shape or 0 in shape:
        raise ValueError(f"tensor {name} is empty")
    if shape[-1] % values_per_unit:
        raise ValueError(f"rows of tensor {name} are no multiple of {values_per_unit} values")
    return math.prod(shape) // values_per_unit * bytes_per_unit


class _Cursor:
    """Reads successive values; raises ``struct.error`` when the file ends early."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, kind: int) -> Any:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"value type {kind} is unknown")
        (value,) = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        return self._take(self.scalar(ValueType.UINT64)).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == ValueType.STRING:
            return self.string()
        if kind == ValueType.ARRAY:
            return self._array()
        return self.scalar(kind)

    def _array(self) -> list[Any]:
        kind = self.scalar(ValueType.UINT32)
        count = self.scalar(ValueType.UINT64)
        if kind == ValueType.STRING:
            return self._strings(count)
        layout = _SCALARS.get(kind)
        if layout is None:
            return [self.value(kind) for _ in range(count)]
        raw = self._take(count * layout.size)
        return np.frombuffer(raw, np.dtype(layout.format)).tolist()

    def _strings(self, count: int) -> list[str]:
        """As ``string``, without its calls: a vocabulary and its merges are 300,000 strings."""
        data, position, strings = self._data, self.position, []
        length_at = _SCALARS[ValueType.UINT64].unpack_from
        for _ in range(count):
            (length,) = length_at(data, position)
            start = position + 8
            position = start + length
            raw = data[start:position]
            if len(raw) != length:
                raise struct.error("file ends early")
            strings.append(raw.decode("utf-8", "replace"))
        self.position = position
        return strings

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise struct.error("file ends early")
        raw = self._data[self.position : end]
        self.position = end
        return raw
