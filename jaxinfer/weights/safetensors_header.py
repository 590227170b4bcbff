"""The header of a safetensors file, which is as strict as the format's own library.

Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data). The
tensors' bytes follow each other without a gap, in the order of their offsets, and fill the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError
from jaxinfer.core.json_text import parse_json
from jaxinfer.weights.checkpoint import TensorInfo, read_bytes

MAX_HEADER_BYTES = 100_000_000  # the library's
MAX_TENSORS = 1_000_000  # of a checkpoint; Kimi-K2-Thinking has 210,000
_MAX_DIMENSIONS = 32  # numpy's
# The dtypes that can be read: as a tensor of floats, or as a part of a quantised matrix.
DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
        "I32": np.dtype(np.int32),
        "I64": np.dtype(np.int64),
    }
)
_READABLE = ("F32", "F16", "BF16")
_BITS: Mapping[str, int] = MappingProxyType(
    {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "F8_E5M2": 8}
    | {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "U32": 32}
    | {"F64": 64, "C64": 64, "U64": 64}
)


def read_header(path: Path) -> dict[str, tuple[TensorInfo, int]]:
    """Each tensor of the file with the byte where its data starts.

    Raises ``CheckpointError`` for a file that the format does not allow, or that is cut off.
    """
    try:
        size = path.stat().st_size
    except OSError as error:  # such as a dangling link in Hugging Face's cache
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}); download it again or check its permissions"
        ) from error
    if size < 8:
        raise CheckpointError(f"{path} is truncated ({size} bytes); download it again")
    length = int(read_bytes(path, 0, 8).view("<u8")[0])
    if length > size - 8 or length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file: its header of {length} bytes does not "
            f"fit in {size} bytes, or exceeds {MAX_HEADER_BYTES}; download it again"
        )
    content = read_bytes(path, 8, length).tobytes()
    try:
        entries = _entries(content)
    except ValueError as error:
        raise CheckpointError(
            f"{path} has a corrupt header ({error}); download it again"
        ) from error
    start = 8 + length
    _check_end(path, entries, size - start)
    return {name: (info, start + offset) for name, (info, offset) in entries.items()}


def _check_end(path: Path, entries: Mapping[str, tuple[TensorInfo, int]], size: int) -> None:
    """Raise ``CheckpointError`` unless the data, of ``size`` bytes, ends with the last tensor."""
    last, end = "", 0
    for name, (info, offset) in entries.items():
        if offset + info.nbytes >= end:
            last, end = name, offset + info.nbytes
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: tensor {last} ends at byte {end} of {size} bytes of data; "
            "download it again"
        )
    if end < size:
        raise CheckpointError(
            f"{path} has {size - end} bytes after its last tensor; download it again"
        )


def _entries(content: bytes) -> dict[str, tuple[TensorInfo, int]]:
    """The tensors and their first bytes in the data; raises ``ValueError``."""
    if not content.startswith(b"{"):
        raise ValueError("it does not begin with {")
    if content.count(b'"data_offsets"') > MAX_TENSORS:
        raise ValueError(f"it has more than {MAX_TENSORS} tensors")
    header: dict[str, Any] = parse_json(content, _natural)
    metadata = header.pop("__metadata__", None)
    texts = metadata.values() if isinstance(metadata, dict) else [metadata]
    if metadata is not None and not all(isinstance(text, str) for text in texts):
        raise ValueError("its __metadata__ is not an object of texts")
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    expected = 0
    for name, (info, offset) in sorted(entries.items(), key=_place):
        if offset != expected:
            raise ValueError(
                f"tensor {short(name)} begins at byte {offset} of the data instead of {expected}"
            )
        expected += info.nbytes
    return entries


def _natural(digits: str) -> int:
    """An integer of the header: each is an offset or a size."""
    if digits.startswith("-") or len(digits) > 20:
        raise ValueError(f"{short(digits)} is neither an offset nor a size")
    return int(digits)


def _place(entry: tuple[str, tuple[TensorInfo, int]]) -> tuple[int, int]:
    """The order of tensors in the data; an empty one comes before the one that begins there."""
    info, offset = entry[1]
    return offset, info.nbytes


def _entry(name: str, entry: Any) -> tuple[TensorInfo, int]:
    """One header entry; raises ``ValueError`` when its numbers contradict each other."""
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype = given.get("dtype")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"tensor {short(name)} has the dtype {short(dtype)}, which is unknown")
    shape, offsets = (_integers(given.get(key)) for key in ("shape", "data_offsets"))
    if shape is None or len(shape) > _MAX_DIMENSIONS or offsets is None or len(offsets) != 2:
        raise ValueError(f"shape and offsets of tensor {short(name)} are not lists of integers")
    bits, nbytes = math.prod(shape) * _BITS[dtype], offsets[1] - offsets[0]
    if nbytes < 0 or bits != 8 * nbytes:
        raise ValueError(f"shape and data size of tensor {short(name)} differ")
    return TensorInfo(tuple(shape), dtype, nbytes, dtype in _READABLE), offsets[0]


def _integers(value: Any) -> list[int] | None:
    is_one = isinstance(value, list) and all(type(one) is int for one in value)
    return value if is_one else None
