"""Tensors of decoders with the gated delta rule, whose layouts differ from Hugging Face's.

Owns: one function for each layout of ``names.Layout``. Source: ``Qwen3NextModel`` and
``_LinearAttentionVReorderBase`` of llama.cpp's conversion/qwen.py and ``KimiLinearModel`` of its
conversion/kimi_linear.py, read backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.header import GGUFTensor
from jaxinfer.weights.gguf.layouts import (
    Changed,
    Moved,
    Named,
    changed_tensors,
    log_of_rates,
    same,
)
from jaxinfer.weights.gguf.names import Layout
from jaxinfer.weights.gguf.stored import Plain, Stored


class DeltaHeads(NamedTuple):
    """The heads of a layer, and the order in which a file has those of values.

    Hugging Face has the value heads of a key head together. In a ``tiled`` file there is first one
    of each key head, then the next one of each.
    """

    num_k: int
    num_v: int
    k_dim: int
    v_dim: int
    tiled: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], *, tiled: bool) -> DeltaHeads:
        """Those of a config.json."""
        if section := config.get("linear_attn_config"):
            heads, width = section["num_heads"], section["head_dim"]
            return cls(heads, heads, width, width, tiled=False)
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        num_k, num_v, k_dim, v_dim = (config[f"linear_{name}"] for name in names)
        return cls(num_k, num_v, k_dim, v_dim, tiled and num_k not in (1, num_v))

    @property
    def each(self) -> int:
        """Value heads of a key head."""
        return self.num_v // self.num_k

    @property
    def order(self) -> np.ndarray | None:  # int[V]
        """For each value head of Hugging Face, that of the file; None if they are in order."""
        if not self.tiled:
            return None
        return np.arange(self.num_v).reshape(self.each, self.num_k).T.reshape(-1)

    def rows(self, width: int) -> np.ndarray | None:  # int[V * width]
        """The same for rows, of which each value head has so many."""
        order = self.order
        return None if order is None else (order[:, None] * width + np.arange(width)).reshape(-1)

    @property
    def channels(self) -> np.ndarray | None:  # int[2K * Dk + V * Dv]
        """The same for queries, keys and values."""
        rows, keys = self.rows(self.v_dim), 2 * self.num_k * self.k_dim
        return None if rows is None else np.concatenate([np.arange(keys), keys + rows])

    def packed(self, *widths: int) -> list[np.ndarray]:
        """The rows of each part of a tensor that has the parts of each key head together."""
        rows = np.arange(self.num_k * sum(widths)).reshape(self.num_k, -1)
        parts = np.split(rows, np.cumsum(widths)[:-1], axis=1)
        return [part.reshape(-1) for part in parts]


def hybrid_tensors(
    layout: Layout, name: str, stored_as: str, tensor: GGUFTensor, heads: DeltaHeads
) -> Named:
    """The tensors of Hugging Face that a tensor of the file holds.

    ``name`` is its name there, and ``stored_as`` the one in the file. Raises ``CheckpointError`` if
    it does not have as many rows, or inputs, as the heads need.
    """
    k, v = heads.num_k * heads.k_dim, heads.num_v * heads.v_dim
    sizes = {"rates": heads.num_v, "heads": heads.num_v, "values": v, "outputs": v}
    sizes |= {"qkv": 2 * k + v, "taps": 2 * k + v, "gates": 2 * heads.num_v, "inputs": 2 * (k + v)}
    axis = 1 if layout == "outputs" else 0
    if layout in _CHANNELS:
        yield name, _of_channels(layout, stored_as, tensor, heads)
        return
    if layout in sizes and tensor.shape[axis : axis + 1] != (sizes[layout],):
        raise CheckpointError(
            f"tensor {stored_as} of {tensor.path} has shape {tensor.shape}, and its heads need "
            f"{sizes[layout]} {'inputs' if axis else 'rows'}; convert the model again"
        )
    if layout in ("gates", "inputs"):
        yield from _unpacked(layout, name, tensor, heads)
    elif layout in _READERS:
        yield name, _READERS[layout](stored_as, tensor, heads)
    else:
        yield from changed_tensors(layout, name, stored_as, tensor, (heads.num_v, heads.num_k))


def _unpacked(layout: Layout, name: str, tensor: GGUFTensor, heads: DeltaHeads) -> Named:
    """The tensors of one that has the rows of each key head together."""
    if layout == "gates":
        parts = dict(zip("ba", heads.packed(heads.each, heads.each), strict=True))
    else:
        values = heads.each * heads.v_dim
        *qkv, z = heads.packed(heads.k_dim, heads.k_dim, values, values)
        parts = {"qkv": np.concatenate(qkv), "z": z}
    for part, rows in parts.items():
        yield name.format(part), Moved(tensor, rows)


def _rates(stored_as: str, tensor: GGUFTensor, heads: DeltaHeads) -> Stored:
    change = log_of_rates(stored_as, tensor)
    return Changed(Moved(tensor, heads.rows(1)), tensor.shape, change)


def _taps(_: str, tensor: GGUFTensor, heads: DeltaHeads) -> Stored:
    channels, *taps = tensor.shape
    return Changed(Moved(tensor, heads.channels), (channels, 1, *taps), same)


def _of_channels(layout: Layout, stored_as: str, tensor: GGUFTensor, heads: DeltaHeads) -> Stored:
    """A tensor of Kimi Linear, whose dimensions of 1 depend on the program that wrote the file."""
    count = heads.num_v if layout == "channel_rates" else heads.num_v * heads.v_dim
    rows = math.prod(tensor.shape if layout == "channel_rates" else tensor.shape[:-1])
    if rows != count:
        raise CheckpointError(
            f"tensor {stored_as} of {tensor.path} has shape {tensor.shape}, and its heads need "
            f"{count} rows; convert the model again"
        )
    if layout == "channel_taps":
        return Changed(Plain(tensor), (count, 1, tensor.shape[-1]), same)
    return Changed(Plain(tensor), (1, 1, count, 1), log_of_rates(stored_as, tensor))


_CHANNELS = ("channel_rates", "channel_taps")
_READERS: Mapping[Layout, Callable[[str, GGUFTensor, DeltaHeads], Stored]] = MappingProxyType(
    {
        "rates": _rates,
        "heads": lambda _, tensor, heads: Moved(tensor, heads.rows(1)),
        "values": lambda _, tensor, heads: Moved(tensor, heads.rows(heads.v_dim)),
        "qkv": lambda _, tensor, heads: Moved(tensor, heads.channels),
        "taps": _taps,
        "outputs": lambda _, tensor, heads: Moved(tensor, parts=heads.order),
    }
)
