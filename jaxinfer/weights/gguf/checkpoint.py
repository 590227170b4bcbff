"""A GGUF file as a ``Checkpoint``: Hugging Face names, shapes and layout, dequantised on reading.

Owns: reading and dequantising.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.checkpoint import TensorInfo, read_bytes, read_chunks
from jaxinfer.weights.gguf.blocks import FORMS, convert
from jaxinfer.weights.gguf.config import hf_config_from_gguf
from jaxinfer.weights.gguf.header import GGUFHeader, GGUFTensor, read_header
from jaxinfer.weights.gguf.keys import check_file_kind
from jaxinfer.weights.gguf.names import NAME_TABLES, ROPE_FACTORS, map_name, undo_interleave
from pallas_kernels.quantised import Form, Quantised, quantised

_UNQUANTISED = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
)
_CHUNK_BYTES = 1 << 16  # per dequantisation call: its float32 values stay in the CPU cache
_CONVERTED_BYTES = 4 << 20  # read at a time where weights stay quantised; bounds temporary arrays


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Read and check a GGUF file's header.

    Raises ``CheckpointError`` for a broken file or a metadata key that is not supported,
    ``UnknownArchitectureError``, and ``SourceError`` for a file that is not a whole model.
    """
    header = read_header(path)
    check_file_kind(header)
    factors = header.tensors.get(ROPE_FACTORS)
    rope_factors = None if factors is None else _read_tensor(path, factors)
    return GGUFCheckpoint(header, hf_config_from_gguf(header, rope_factors))


class _StoredTensor(NamedTuple):
    """A tensor of the file and how its layout differs from Hugging Face's."""

    tensor: GGUFTensor
    interleaved_heads: int  # heads whose rows are permuted; 0: rows are in order
    transposed: bool


class GGUFCheckpoint:
    """See ``Checkpoint``; ``hf_config`` is the config.json that the file's metadata describe."""

    unneeded: frozenset[str] = frozenset()

    def __init__(self, header: GGUFHeader, hf_config: Mapping[str, Any]) -> None:
        self.header = header
        self.hf_config = hf_config
        self.quantised = any(one.type not in _UNQUANTISED for one in header.tensors.values())
        self.tensors: dict[str, TensorInfo] = {}
        self.forms: dict[str, Form] = {}
        self._stored: dict[str, _StoredTensor] = {}
        table = NAME_TABLES[header.metadata["general.architecture"]]
        for gguf_name, tensor in header.tensors.items():
            if gguf_name == ROPE_FACTORS:  # read by ``open_gguf``
                continue
            name, stem = map_name(table, gguf_name)
            if "{}" in name:
                for number, expert in enumerate(_parts(header, gguf_name, tensor)):
                    self._add(name.format(number), _StoredTensor(expert, 0, transposed=False))
                continue
            heads = hf_config[table.interleaved[stem]] if stem in table.interleaved else 0
            self._add(name, _StoredTensor(tensor, heads, stem in table.transposed))

    def _add(self, name: str, stored: _StoredTensor) -> None:
        tensor = stored.tensor
        shape = tensor.shape[::-1] if stored.transposed else tensor.shape
        readable = _can_dequantise(tensor.type)
        self.tensors[name] = TensorInfo(shape, tensor.type.name, tensor.nbytes, readable)
        self._stored[name] = stored
        if tensor.type in FORMS and len(tensor.shape) == 2:
            self.forms[name] = FORMS[tensor.type]

    def read(self, name: str, part: int | None = None) -> np.ndarray:  # float32
        """See ``Checkpoint``."""
        assert part is None, "a stack's parts are tensors of their own"
        stored = self._stored[name]
        values = _read_tensor(self.header.path, stored.tensor)
        if stored.interleaved_heads:
            values = undo_interleave(values, stored.interleaved_heads)
        return values.T if stored.transposed else values

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``."""
        assert part is None, "a stack's parts are tensors of their own"
        tensor, interleaved_heads, _ = self._stored[name]
        outputs, inputs = tensor.shape
        row_bytes = tensor.nbytes // outputs
        made = {
            part: np.empty(*array)
            for part, array in self.forms[name].arrays(outputs, inputs).items()
        }
        size = max(1, _CONVERTED_BYTES // row_bytes) * row_bytes
        done = 0
        for raw in read_chunks(self.header.path, tensor.offset, tensor.nbytes, size):
            rows = raw.reshape(-1, row_bytes)
            into = {part: array[done : done + len(rows)] for part, array in made.items()}
            convert(tensor.type, rows, into)
            done += len(rows)
        if interleaved_heads:
            made = {n: undo_interleave(part, interleaved_heads) for n, part in made.items()}
        return quantised(made)


def _parts(header: GGUFHeader, name: str, stack: GGUFTensor) -> Iterator[GGUFTensor]:
    """The matrices of a stack, one for each expert."""
    if len(stack.shape) != 3:
        raise CheckpointError(
            f"tensor {name} of {header.path} has shape {stack.shape} instead of that of a stack of "
            "experts; convert the model again"
        )
    nbytes = stack.nbytes // stack.shape[0]
    for number in range(stack.shape[0]):
        yield GGUFTensor(stack.shape[1:], stack.type, stack.offset + number * nbytes, nbytes)


def _read_tensor(path: Path, tensor: GGUFTensor) -> np.ndarray:  # float32[tensor.shape]
    """Dequantise chunk by chunk into the result, so that no second copy of it exists."""
    values_per_unit, bytes_per_unit = GGML_QUANT_SIZES[tensor.type]
    values = np.empty(tensor.nbytes // bytes_per_unit * values_per_unit, np.float32)
    chunk_bytes = _CHUNK_BYTES // bytes_per_unit * bytes_per_unit
    for start in range(0, tensor.nbytes, chunk_bytes):
        count = min(chunk_bytes, tensor.nbytes - start)
        raw = read_bytes(path, tensor.offset + start, count)
        first = start // bytes_per_unit * values_per_unit
        chunk = dequantize(raw[None], tensor.type)[0]  # as one row: gguf loops over rows in Python
        values[first : first + len(chunk)] = chunk
    return values.reshape(tensor.shape)


@cache
def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
