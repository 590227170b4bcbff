"""Safetensors checkpoints: one file, or shards listed by an index.

Owns: the file header, the index, and which files of a folder belong to the checkpoint.
Must not know: models, config.json, the cache.
Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.core.errors import CheckpointError, SourceError
from jaxinfer.weights.checkpoint import TensorInfo, read_bytes

INDEX_NAME = "model.safetensors.index.json"
_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
    }
)


@dataclass(frozen=True)
class _Region:
    path: Path
    offset: int


class SafetensorsCheckpoint:
    """The tensors of some safetensors files, checked against the files' sizes when opened."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._tensors: dict[str, TensorInfo] = {}
        self._regions: dict[str, _Region] = {}
        for path in paths:
            for name, (info, offset) in _read_header(path).items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"tensor {name} is both in {self._regions[name].path} and in {path}; "
                        "remove the file that does not belong to the checkpoint"
                    )
                self._tensors[name] = info
                self._regions[name] = _Region(path, offset)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See ``Checkpoint``."""
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        """See ``Checkpoint``."""
        info, region = self._tensors[name], self._regions[name]
        data = read_bytes(region.path, region.offset, info.nbytes)
        return data.view(_DTYPES[info.dtype]).reshape(info.shape)


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face folder, in order.

    The index decides where there is one; otherwise every ``*.safetensors`` file belongs.
    Raises ``SourceError`` when there is none and ``CheckpointError`` when a shard is missing.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise SourceError(
            f"{folder} holds only pickled weights, which can run code when read; convert them to "
            "safetensors (save_pretrained of transformers writes them)"
        )
    raise SourceError(
        f"{folder} holds no *.safetensors file; copy the weights there, "
        "or use load_format='dummy' for random ones"
    )


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not a safetensors index; download it again or delete it"
        ) from error
    for name in names:
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent / name} is missing although {INDEX_NAME} names it; "
                "download that shard"
            )
    return tuple(index.parent / name for name in names)


def _read_header(path: Path) -> dict[str, tuple[TensorInfo, int]]:
    """Each tensor of the file with the byte where its data starts."""
    try:
        size = path.stat().st_size
    except OSError as error:  # such as a dangling link in Hugging Face's cache
        raise CheckpointError(
            f"cannot read {path} ({error.strerror}); download it again or check its permissions"
        ) from error
    if size < 8:
        raise CheckpointError(f"{path} is truncated ({size} bytes); download it again")
    length = int(read_bytes(path, 0, 8).view("<u8")[0])
    if length > size - 8:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file: its header of {length} bytes does not "
            f"fit in {size} bytes; download it again"
        )
    try:
        header: dict[str, Any] = json.loads(read_bytes(path, 8, length).tobytes())
        header.pop("__metadata__", None)
        entries = {name: _entry(entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a corrupt header; download it again") from error
    data_start = 8 + length
    for name, (info, offset) in entries.items():
        if data_start + offset + info.nbytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte "
                f"{data_start + offset + info.nbytes} of {size}; download it again"
            )
    return {name: (info, data_start + offset) for name, (info, offset) in entries.items()}


def _entry(entry: Mapping[str, Any]) -> tuple[TensorInfo, int]:
    """One header entry; raises ``ValueError`` when its numbers contradict each other."""
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    known = _DTYPES.get(dtype)
    if not 0 <= start <= end or min(shape, default=0) < 0:
        raise ValueError("negative size")
    if known is not None and math.prod(shape) * known.itemsize != end - start:
        raise ValueError("shape and data size differ")
    return TensorInfo(shape, dtype, end - start, known is not None), start
