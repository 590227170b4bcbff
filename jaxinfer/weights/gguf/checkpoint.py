"""A GGUF file as a ``Checkpoint``, with the names, shapes and layouts of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.hf_config import MAX_ALL_EXPERTS, MAX_HEAD_DIM
from jaxinfer.weights.checkpoint import TensorInfo
from jaxinfer.weights.gguf.config import hf_config_from_gguf
from jaxinfer.weights.gguf.dequantise import PLAIN_DTYPES, check_type
from jaxinfer.weights.gguf.header import GGUFHeader, GGUFTensor
from jaxinfer.weights.gguf.hybrid import DeltaHeads, hybrid_tensors
from jaxinfer.weights.gguf.keys import check_file_kind
from jaxinfer.weights.gguf.layouts import Named, changed_tensors
from jaxinfer.weights.gguf.names import ROPE_TENSORS, Joined, NameTable, map_name
from jaxinfer.weights.gguf.names_delta import DELTA_TABLES, QWEN3_NEXT
from jaxinfer.weights.gguf.names_dense import DENSE_TABLES, FALCON_WITH_TWO_NORMS
from jaxinfer.weights.gguf.names_experts import EXPERTS_TABLES
from jaxinfer.weights.gguf.names_states import STATE_TABLES
from jaxinfer.weights.gguf.parts import read_whole
from jaxinfer.weights.gguf.stored import (
    ExpertStack,
    KeysAndValues,
    Numbers,
    Plain,
    Rows,
    Stored,
    experts_of,
    halves_of,
    read_tensor,
)
from pallas_kernels.lib.quantised import Form, Quantised

# by the model_type of config.json
_TABLES: Mapping[str, NameTable] = MappingProxyType(
    {**DENSE_TABLES, **EXPERTS_TABLES, **DELTA_TABLES, **STATE_TABLES}
)


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Read and check a GGUF file's header; of a split file, ``path`` is the first part.

    Raises ``CheckpointError`` for a broken file, or a metadata key or type of a tensor that is not
    supported, ``UnknownArchitectureError``, and ``SourceError`` for a file that is not a whole
    model.
    """
    header = read_whole(path)
    check_file_kind(header)
    present = (name for name in ROPE_TENSORS if name in header.tensors)
    factors = {name: _rope_factors(name, header.tensors[name]) for name in present}
    return GGUFCheckpoint(header, hf_config_from_gguf(header, factors))


def _rope_factors(name: str, tensor: GGUFTensor) -> np.ndarray:  # float32[H / 2]
    check_type(tensor.path, name, tensor.type)
    if tensor.nbytes > 4 * MAX_HEAD_DIM:  # before it is read
        raise CheckpointError(
            f"{tensor.path}: its tensor {name} has shape {tensor.shape}, and holds more numbers "
            "than a head; convert the model again"
        )
    return read_tensor(tensor)


class GGUFCheckpoint:
    """See ``Checkpoint``; ``hf_config`` is the config.json that the file's metadata describe."""

    unneeded: frozenset[str] = frozenset()

    def __init__(self, header: GGUFHeader, hf_config: Mapping[str, Any]) -> None:
        self.header = header
        self.hf_config = hf_config
        self.quantised = any(one.type not in PLAIN_DTYPES for one in header.tensors.values())
        self.tensors: dict[str, TensorInfo] = {}
        self.forms: dict[str, Form] = {}
        self._stored: dict[str, Stored] = {}
        table = _table_of(str(header.metadata.get("general.architecture")), hf_config)
        changed = _changed(table, hf_config)
        is_left_out = _prediction_tensors(hf_config)
        # whether tensors of prediction layers are left out
        self.has_predictions = any(map(is_left_out, header.tensors))
        parts: dict[tuple[str, Joined], dict[str, GGUFTensor]] = {}
        num_experts = 0
        for gguf_name, tensor in header.tensors.items():
            if gguf_name in ROPE_TENSORS or is_left_out(gguf_name):  # ``open_gguf`` reads factors
                continue
            name, stem, joined, layout = map_name(table, gguf_name)
            check_type(header.path, gguf_name, tensor.type)
            if joined is not None:
                parts.setdefault((name, joined), {})[gguf_name] = tensor
            elif layout not in (None, "gates_and_ups"):
                for own, stored in changed(layout, name, gguf_name, tensor):
                    self._add(own, stored)
            elif "{}" in name:
                _check_rank(header, gguf_name, tensor, 3)
                num_experts += tensor.shape[0] * (1 if layout is None else 2)
                _check_experts(header, num_experts)
                for number, expert in enumerate(experts_of(tensor)):
                    pair = layout is not None and zip(
                        ("gate", "up"), halves_of(expert), strict=True
                    )
                    for kind, matrix in pair or [("", expert)]:
                        self._add(name.format(number, kind), Plain(matrix))
            else:
                # their number may differ between layers
                heads = tensor.shape[0] // _head_dim(hf_config) if stem in table.interleaved else 0
                self._add(name, Plain(tensor, heads, stem in table.transposed))
        for (name, joined), members in parts.items():
            if name not in self.tensors:  # some files of DeepSeek have attn_kv_b as well
                heads = tuple(hf_config.get(key) or 0 for key in table.heads)
                self._add(name, _joined(header, joined, members, heads))
        for key, (own, shape) in table.from_metadata.items():
            for i, number in enumerate(_of_each_layer(header, key, hf_config)):
                tensor = np.full(shape, number, np.float32)
                self._add(f"{table.layer_prefix}{i}.{own}", Numbers(tensor))

    def _add(self, name: str, stored: Stored) -> None:
        types = dict.fromkeys(tensor.type for tensor in stored.tensors)
        nbytes = sum(tensor.nbytes for tensor in stored.tensors)
        count = sum(math.prod(tensor.shape) for tensor in stored.tensors)
        self.tensors[name] = TensorInfo(
            stored.shape,
            " and ".join(kind.name for kind in types),
            nbytes * math.prod(stored.shape) // max(count, 1),  # it may hold other tensors as well
            readable=True,
        )
        self._stored[name] = stored
        if stored.form is not None:
            self.forms[name] = stored.form

    def read(self, name: str, part: int | None = None) -> np.ndarray:  # float32
        """See ``Checkpoint``."""
        return self._stored[name].read(part)

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``."""
        return self._stored[name].read_quantised(part)


def _table_of(architecture: str, hf_config: Mapping[str, Any]) -> NameTable:
    if architecture == "qwen3next":
        return QWEN3_NEXT
    if hf_config.get("num_ln_in_parallel_attn") == 2:
        return FALCON_WITH_TWO_NORMS
    return _TABLES[hf_config["model_type"]]


def _changed(table: NameTable, hf_config: Mapping[str, Any]) -> Callable[..., Named]:
    """The function that reads the tensors with layouts."""
    if table.is_delta:
        return partial(hybrid_tensors, heads=DeltaHeads.of(hf_config, tiled=table.tiled))
    heads, kv_heads = (hf_config.get(key) or 0 for key in table.heads)
    return partial(changed_tensors, heads=(heads, kv_heads))


def _of_each_layer(header: GGUFHeader, key: str, hf_config: Mapping[str, Any]) -> list[float]:
    """A number of each layer; one number in the file is that of all.

    Raises ``CheckpointError`` for another number of numbers.
    """
    stored, count = header.metadata.get(key), hf_config["num_hidden_layers"]
    numbers = stored if isinstance(stored, list) else [stored] * count
    if len(numbers) != count or not all(type(one) is float for one in numbers):
        raise CheckpointError(
            f"{header.path}: metadata key {key} must be {count} numbers, got {short(stored)}; "
            "convert the model again"
        )
    return numbers


def _prediction_tensors(hf_config: Mapping[str, Any]) -> Callable[[str], bool]:
    """A function of a tensor's name in the file: whether it is of a layer that is left out."""
    if not hf_config.get("num_nextn_predict_layers"):
        return lambda name: False
    first = hf_config.get("num_hidden_layers") or hf_config["n_layer"]
    return lambda name: name.startswith("blk.") and int(name.split(".")[1]) >= first


def _check_experts(header: GGUFHeader, count: int) -> None:
    """Raise ``CheckpointError`` for more matrices of experts than any model has."""
    if count > 3 * MAX_ALL_EXPERTS:  # gates, ups and downs
        raise CheckpointError(
            f"{header.path} has at least {count} matrices of experts, and at most "
            f"{3 * MAX_ALL_EXPERTS} are supported; use another file"
        )


def _head_dim(hf_config: Mapping[str, Any]) -> int:
    """The width of a query or a key."""
    return hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]


def _joined(
    header: GGUFHeader,
    joined: Joined,
    members: Mapping[str, GGUFTensor],
    heads: tuple[int, ...],
) -> Stored:
    """The tensor that ``members``, by their names in the file, are parts of; ``heads`` are the
    numbers of heads and of KV heads.

    Raises ``CheckpointError`` if one is missing or has the wrong shape.
    """
    present = next(iter(members))
    layer = present.removesuffix(next(part for part in joined.parts if present.endswith(part)))
    names = [layer + part for part in joined.parts]
    if missing := next((name for name in names if name not in members), None):
        raise CheckpointError(
            f"{header.path} has the tensor {present} but not {missing}; download it again"
        )
    tensors = [members[name] for name in names]
    is_rows = joined.layout in ("rows", "interleaved")
    rank = 2 if is_rows or joined.parts[0].endswith(".bias") else 3
    for name, tensor in zip(names, tensors, strict=True):
        _check_rank(header, name, tensor, rank)
    first, *others = tensors
    if joined.layout == "keys_and_values":
        fit = (first.shape[0], first.shape[1]) == (others[0].shape[0], others[0].shape[2])
    elif is_rows:
        fit = all(other.shape[1] == first.shape[1] for other in others)
    else:
        fit = all(other.shape == first.shape for other in others)
    if not fit:
        raise CheckpointError(
            f"tensors {' and '.join(names)} of {header.path} have shapes "
            f"{' and '.join(str(tensor.shape) for tensor in tensors)}, which do not fit together; "
            "convert the model again"
        )
    if joined.layout == "keys_and_values":
        return KeysAndValues(*tensors)
    if is_rows:
        return Rows((*tensors,), (*heads, 0) if joined.layout == "interleaved" else ())
    alternating = joined.layout == "alternating"
    return ExpertStack((*tensors,), alternating, transposed=joined.layout != "experts")


def _check_rank(header: GGUFHeader, name: str, tensor: GGUFTensor, rank: int) -> None:
    if len(tensor.shape) != rank:
        raise CheckpointError(
            f"tensor {name} of {header.path} has shape {tensor.shape} instead of one of {rank} "
            "dimensions; convert the model again"
        )
