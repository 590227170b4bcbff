"""Safetensors checkpoints: one file, or shards listed by an index.

Owns: reading headers and indexes, and finding the files of a folder that belong to the checkpoint.
Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.core.errors import CheckpointError, SourceError
from jaxinfer.weights.checkpoint import TensorInfo, read_bytes
from pallas_kernels.quantised import Form, Quantised

FILE_NAME = "model.safetensors"
_INDEX_END = ".safetensors.index.json"
INDEX_NAME = "model" + _INDEX_END
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Files next to a model's own that do not belong to it: Mistral's own layout, adapters, and the same
# weights in another dtype.
_OTHER_LAYOUT = re.compile(r"consolidated|adapter_")
_VARIANT = re.compile(r"model\.\w+(-\d+-of-\d+)?\.safetensors|model-\d+-of-\d+\.\w+\.safetensors")
_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        # parts of quantised matrices: ``weights.quantised``
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
        "I32": np.dtype(np.int32),
        "I64": np.dtype(np.int64),
    }
)
_READABLE = ("F32", "F16", "BF16")


class SafetensorsCheckpoint:
    """The tensors of several safetensors files; opening checks them against the files' sizes."""

    unneeded: frozenset[str] = frozenset()

    def __init__(self, paths: Iterable[Path]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.forms: dict[str, Form] = {}  # a checkpoint of floats
        self._places: dict[str, tuple[Path, int]] = {}  # each tensor's file, and its first byte
        for path in paths:
            for name, (info, offset) in _read_header(path).items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"tensor {name} is both in {self._places[name][0]} and in {path}; "
                        "remove the file that does not belong to the checkpoint"
                    )
                self.tensors[name] = replace(info, file=path.name)
                self._places[name] = (path, offset)

    def leave_out(self, is_left_out: Callable[[str], bool]) -> bool:
        """Forget the tensors with such names, as if no file had them; True if there are any."""
        names = [name for name in self.tensors if is_left_out(name)]
        for name in names:
            del self.tensors[name]
        return bool(names)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``; a part of a quantised matrix has the dtype that is stored."""
        info, (path, offset) = self.tensors[name], self._places[name]
        shape, nbytes = info.shape, info.nbytes
        if part is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
            offset += part * nbytes
        data = read_bytes(path, offset, nbytes)
        return data.view(_DTYPES[info.dtype]).reshape(shape)

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``; no matrix is quantised."""
        raise KeyError(name)


def checkpoint_files(folder: Path, named: object = None) -> tuple[Path, ...]:
    """The safetensors files of a Hugging Face folder that hold its model, in order.

    As in transformers: the file or index that config.json names (``named``, the value of its key
    ``transformers_weights``), else model.safetensors, else the files that the index lists. Without
    any of these, the numbered shards, or else all safetensors files that are not of another layout.
    Raises ``SourceError`` if there is none and ``CheckpointError`` if a shard is missing.
    """
    if named is not None:
        return _named_files(folder, named)
    if (folder / FILE_NAME).is_file():
        return (folder / FILE_NAME,)
    if (folder / INDEX_NAME).is_file():
        return _indexed_files(folder / INDEX_NAME)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards := [name for name in names if _SHARD.fullmatch(name)]:
        return _all_shards(folder, shards)
    own = [name for name in names if not _OTHER_LAYOUT.match(name)]
    plain = [name for name in own if not _VARIANT.fullmatch(name)]
    if plain or own:
        return tuple(folder / name for name in plain or own)
    raise SourceError(_no_files_message(folder, names))


def _no_files_message(folder: Path, others: list[str]) -> str:
    if others:
        return (
            f"{folder} holds {', '.join(others)}, another layout or an adapter, and no "
            f"{FILE_NAME}; add the model's own files (save_pretrained of transformers writes them)"
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return (
            f"{folder} holds only pickled weights, which can run code when read; convert them to "
            "safetensors (save_pretrained of transformers writes them)"
        )
    return (
        f"{folder} holds no *.safetensors file; copy the weights there, "
        "or use load_format='dummy' for random ones"
    )


def _named_files(folder: Path, named: object) -> tuple[Path, ...]:
    """The file or indexed files that config.json names, which must be inside the folder."""
    if not isinstance(named, str) or not named.endswith((".safetensors", _INDEX_END)):
        raise SourceError(
            f"config key 'transformers_weights' is {named!r}; it must name a .safetensors file or "
            "an index of such files"
        )
    path = folder / named
    outside = os.path.isabs(named) or os.path.normpath(named).startswith("..")
    if outside or not path.is_file():  # links may lead out, as in Hugging Face's cache
        raise SourceError(
            f"config key 'transformers_weights' names {named}, and {folder} holds no such file; "
            "copy it there or remove the key"
        )
    return _indexed_files(path) if named.endswith(_INDEX_END) else (path,)


def _all_shards(folder: Path, names: list[str]) -> tuple[Path, ...]:
    """Shards without an index; their names contain their number."""
    total = names[0].removesuffix(".safetensors").rpartition("-")[2]
    expected = [f"model-{i + 1:0{len(total)}d}-of-{total}.safetensors" for i in range(int(total))]
    if names != expected:
        odd = sorted(set(expected) ^ set(names))[0]
        raise CheckpointError(
            f"{folder} holds {len(names)} shards of {total}, and {odd} is "
            f"{'missing; download it' if odd in expected else 'of another checkpoint; remove it'}"
        )
    return tuple(folder / name for name in names)


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
                f"{index.parent / name} is missing although {index.name} names it; "
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
        entries = {name: _entry(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a corrupt header; download it again") from error
    for name, (info, start) in entries.items():
        if start + info.nbytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {start + info.nbytes} of {size}; "
                "download it again"
            )
    return entries


def _entry(entry: Mapping[str, Any], data_start: int) -> tuple[TensorInfo, int]:
    """One header entry; raises ``ValueError`` when its numbers contradict each other."""
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(size) for size in entry["shape"])
    dtype = str(entry["dtype"])
    known = _DTYPES.get(dtype)
    if not 0 <= start <= end or min(shape, default=0) < 0:
        raise ValueError("negative size")
    if known is not None and math.prod(shape) * known.itemsize != end - start:
        raise ValueError("shape and data size differ")
    return TensorInfo(shape, dtype, end - start, dtype in _READABLE), data_start + start
