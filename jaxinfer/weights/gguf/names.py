"""The form of the tables that map names of GGUF's tensors to those of Hugging Face.

Owns: ``NameTable``, and finding the place of a tensor in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from jaxinfer.core.errors import CheckpointError

# A stem may have dots: "shortconv.conv".
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?")
# Tensors that are no weights of the model: ``rope`` makes a config of them.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)

# How a tensor differs from Hugging Face's, see ``layouts``; from "row" on see ``hybrid``.
type Layout = Literal[
    "norm",
    "flat",
    "packed",
    "query_key_value",
    "each_head",
    "gates_and_ups",
    "experts_rows",
    "experts_columns",
    "log_rates",
    "row",
    "conv",
    "rates",
    "heads",
    "values",
    "qkv",
    "taps",
    "outputs",
    "gates",
    "inputs",
    "channel_rates",
    "channel_taps",
]
# How several tensors of the file make one, see ``stored``.
# "interleaved" are rows of queries, of keys and of values, of which the first two are permuted.
type Joint = Literal[
    "keys_and_values", "alternating", "experts_transposed", "experts", "rows", "interleaved"
]


class Joined(NamedTuple):
    """Tensors of a layer in the file that are one tensor of Hugging Face."""

    name: str
    parts: tuple[str, ...]
    layout: Joint


@dataclass(frozen=True)
class NameTable:
    """Stems without ``.weight`` and ``.bias``; a layer's stems follow ``blk.<i>.``.

    A name with {} is that of each expert, by its number; the file stacks the experts of a layer.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str
    interleaved: tuple[str, ...] = ()  # stems whose rows are permuted for interleaved rope
    transposed: tuple[str, ...] = ()  # stems of weights that Hugging Face stores [in, out]
    # of a layer's tensors without ".weight" and ".bias" in Hugging Face's names, by full names
    bare: Mapping[str, str] = MappingProxyType({})
    joined: tuple[Joined, ...] = ()
    # by stems, or by full names where weight and bias differ
    layouts: Mapping[str, Layout] = MappingProxyType({})
    # the config keys of heads and KV heads, for layouts that need their numbers
    heads: tuple[str, str] = ("num_attention_heads", "num_key_value_heads")
    is_delta: bool = False  # whether ``hybrid`` reads the tensors with layouts
    # whether value heads are in the order that ``hybrid.DeltaHeads`` describes
    tiled: bool = False
    # names and shapes of a layer's numbers that are lists in the metadata, by their keys
    from_metadata: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({})


class Place(NamedTuple):
    """The place of a GGUF tensor in Hugging Face's checkpoint."""

    name: str  # with {} that of each expert
    stem: str
    joined: Joined | None = None  # the tensor is one part of ``name``
    layout: Layout | None = None


def map_name(table: NameTable, gguf_name: str) -> Place:
    """The place of a GGUF tensor.

    Raises ``CheckpointError`` for a tensor the architecture does not have.
    """
    match = _GGUF_NAME.fullmatch(gguf_name)
    index, stem, kind = match.groups() if match else (None, "", "")
    prefix = "" if index is None else f"{table.layer_prefix}{index}."
    stems = table.model if index is None else table.layer
    own = stem if kind is None else f"{stem}.{kind}"
    layout = table.layouts.get(own) or table.layouts.get(stem)
    in_layer = own if index is not None else ""
    if in_layer in table.bare:
        return Place(prefix + table.bare[in_layer], stem, layout=layout)
    for joined in table.joined:
        if in_layer in joined.parts:
            return Place(prefix + joined.name, stem, joined)
    if stem not in stems or kind is None:
        raise CheckpointError(
            f"tensor {gguf_name} has no place in this architecture; the file was made for a "
            "variant that jaxinfer does not support"
        )
    return Place(f"{prefix}{stems[stem]}.{kind}", stem, layout=layout)


def undo_interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:  # [heads * H, ...] -> same
    """Reorder each head's rows from adjacent pairs 0, H/2, 1, H/2 + 1, ... to 0, 1, ..., H - 1."""
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.swapaxes(1, 2).reshape(rows.shape)
