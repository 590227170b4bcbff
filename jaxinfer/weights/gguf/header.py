"""The header of a GGUF file: its metadata and where each tensor lies.

Owns: parsing, and the checks of llama.cpp's reader (ggml's gguf.cpp): tensors follow each other
without a gap but for alignment, within the file. Bytes after the last one are allowed, as there.

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

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.shapes import round_up
from jaxinfer.weights.gguf.types import BLOCK_SIZES, TensorType, ValueType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# Bounds for damaged and hostile files. Published headers have up to 2,000 tensors, 15 MB, and 1.1
# million values in arrays (a vocabulary with types and scores, and its merges).
MAX_TENSORS, MAX_KEYS, MAX_HEADER_BYTES, MAX_VALUES = 1_000_000, 65_536, 100_000_000, 8_000_000
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

    path: Path
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The part of a GGUF file before its data; ``digest`` is the SHA-256 of those bytes.

    ``files`` are the file at ``path`` and, of a split one, the further parts.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    digest: str
    files: tuple[Path, ...]


def read_header(path: Path) -> GGUFHeader:
    """Parse and check a header.

    Raises ``CheckpointError`` for a file that is not GGUF, has an unknown version or tensor type,
    has tensors at other places than llama.cpp expects, or ends before its header or its last
    tensor does.
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
        raise CheckpointError(
            f"{path} ends inside its header, or has one of more than {MAX_HEADER_BYTES} bytes; "
            "download it again"
        ) from error
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
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise ValueError(f"it says it has {num_tensors} tensors and {num_keys} metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.name()
        if key in metadata:
            raise ValueError(f"metadata key {short(key)} is there twice")
        metadata[key] = cursor.value(cursor.scalar(ValueType.UINT32))
    entries = [_tensor_entry(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {short(alignment)}, no power of 2")
    data_start, expected = round_up(cursor.position, alignment), 0
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {short(name)} is there twice")
        if offset != expected:
            for other, _, stored, _ in entries:  # a type that cannot be read says more
                _check_type(path, other, stored)
            raise ValueError(
                f"tensor {short(name)} begins at byte {offset} of the data instead of {expected}"
            )
        tensor = GGUFTensor(
            path, shape, kind, data_start + offset, _stored_bytes(name, shape, kind)
        )
        expected += round_up(tensor.nbytes, alignment)
        if tensor.offset + tensor.nbytes > len(data):
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {tensor.offset + tensor.nbytes} "
                f"of {len(data)}; download it again"
            )
        tensors[name] = tensor
    digest = hashlib.sha256(memoryview(data)[: cursor.position]).hexdigest()
    return GGUFHeader(path, metadata, tensors, digest, (path,))


def _tensor_entry(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.name()
    num_dims = cursor.scalar(ValueType.UINT32)
    if num_dims > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {short(name)} has {num_dims} dimensions")
    dims = [cursor.scalar(ValueType.UINT64) for _ in range(num_dims)]  # row length first
    number = cursor.scalar(ValueType.UINT32)
    if number not in TensorType:
        _check_type(path, name, number)
    return name, tuple(reversed(dims)), TensorType(number), cursor.scalar(ValueType.UINT64)


def _check_type(path: Path, name: str, number: int) -> None:
    # imported here as it imports JAX, which headers of tokenizers do not need
    from jaxinfer.weights.gguf.dequantise import check_type

    check_type(path, name, number)


def _stored_bytes(name: str, shape: tuple[int, ...], kind: TensorType) -> int:
    values_per_unit, bytes_per_unit = BLOCK_SIZES[kind]
    if not shape or 0 in shape:
        raise ValueError(f"tensor {short(name)} is empty")
    if shape[-1] % values_per_unit:
        words = f"are no multiple of {values_per_unit} values"
        raise ValueError(f"rows of tensor {short(name)} {words}")
    return math.prod(shape) // values_per_unit * bytes_per_unit


class _Cursor:
    """Reads successive values; raises ``struct.error`` when the file ends early, and ``ValueError``
    for what no GGUF file holds.
    """

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self._values = 0  # in all arrays
        self.position = position

    def scalar(self, kind: int) -> Any:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise ValueError(f"value type {kind} is unknown")
        (value,) = layout.unpack_from(self._data, self.position)
        if kind == ValueType.BOOL and self._data[self.position] > 1:
            raise ValueError(f"a truth value is {self._data[self.position]}")
        self.position += layout.size
        return value

    def name(self) -> str:
        """A key, or the name of a tensor; ``UnicodeDecodeError`` is a ``ValueError``."""
        return self._take(self.scalar(ValueType.UINT64)).decode()

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
        self._values += count
        if self._values > MAX_VALUES:
            raise ValueError(f"its arrays have more than {MAX_VALUES} values")
        if kind == ValueType.STRING:
            return self._strings(count)
        layout = _SCALARS.get(kind)
        if layout is None:  # llama.cpp knows no arrays of arrays either
            raise ValueError(f"an array has values of type {kind}")
        raw = self._take(count * layout.size)
        if kind == ValueType.BOOL and raw.translate(None, b"\0\1"):
            raise ValueError("an array has truth values other than 0 and 1")
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
            if len(raw) != length or position > MAX_HEADER_BYTES:
                raise struct.error("file ends early")
            strings.append(raw.decode("utf-8", "replace"))
        self.position = position
        return strings

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data) or end > MAX_HEADER_BYTES:
            raise struct.error("file ends early")
        raw = self._data[self.position : end]
        self.position = end
        return raw
