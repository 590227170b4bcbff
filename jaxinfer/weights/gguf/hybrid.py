"""Tensors of decoders with the gated delta rule, whose layouts differ from Hugging Face's.

Owns: one function for each layout of ``names.Layout``. Source: ``Qwen3NextModel`` and
``_LinearAttentionVReorderBase`` of llama.cpp's conversion/qwen.py and ``KimiLinearModel`` of its
conversion/kimi_linear.py, read backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.blocks import FORMS
from jaxinfer.weights.gguf.header import GGUFTensor
from jaxinfer.weights.gguf.names import Layout
from jaxinfer.weights.gguf.stored import Plain, Stored, converted, read_tensor
from pallas_kernels.lib.quantised import PACKED, Form, Quantised, nibble_block, quantised

type Named = Iterator[tuple[str, Stored]]  # tensors of Hugging Face, by their names


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
    else:
        yield name, _READERS[layout](stored_as, tensor, heads)


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


class Moved(NamedTuple):
    """Rows of a tensor in another order, or parts of its inputs, of equal widths."""

    tensor: GGUFTensor
    rows: np.ndarray | None = None  # int[O]: for each output, the row of the file
    parts: np.ndarray | None = None  # int[P]: for each part of the inputs, that of the file

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """See ``Stored``."""
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Stored``."""
        first, *others = self.tensor.shape
        return (first if self.rows is None else len(self.rows), *others)

    @property
    def form(self) -> Form | None:
        """See ``Stored``; None if a part of the inputs is not a number of whole groups."""
        form = FORMS.get(self.tensor.type) if len(self.tensor.shape) == 2 else None
        if form is None or self.parts is None:
            return form
        inputs = self.tensor.shape[1]
        width, group = inputs // len(self.parts), form.group or inputs
        if width % group or (form.kind in PACKED and width % nibble_block(inputs)):
            return None
        if form.super_group is None:
            return form
        shared = math.gcd(width, form.super_group)
        return replace(form, super_group=shared) if shared % group == 0 else None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        assert part is None, "only stacks have parts"
        values = read_tensor(self.tensor)
        if self.rows is not None:
            values = values[self.rows]
        return values if self.parts is None else _parts(values, self.parts)

    def read_quantised(self, part: int | None) -> Quantised:
        """See ``Stored``."""
        assert part is None and self.form is not None
        made = quantised(converted(self.tensor))
        if self.rows is not None:
            made = made.rows(self.rows)
        if self.parts is None:
            return made
        values, scales, zeros, offsets, supers = made.arrays
        assert zeros is None, "no form of the file has zeros"
        if supers is not None:  # parts divide the inputs of some
            count = made.num_inputs // (self.form.super_group or made.num_inputs)
            supers = np.repeat(supers, count // supers.shape[1], axis=1)
        moved = (
            None if one is None else _parts(one, self.parts)
            for one in (values, scales, None, offsets, supers)
        )
        return Quantised(made.kind, *moved)


def _parts(array: np.ndarray, order: np.ndarray) -> np.ndarray:  # [O, I, ...] -> the same shape
    """The equal parts of the second dimension in this order."""
    parts = array.reshape(len(array), len(order), -1)
    return np.ascontiguousarray(parts[:, order]).reshape(array.shape)


class Changed(NamedTuple):
    """A tensor of floats with another shape, or other values."""

    of: Stored
    shape: tuple[int, ...]
    change: Callable[[np.ndarray], np.ndarray]

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """See ``Stored``."""
        return self.of.tensors

    @property
    def form(self) -> Form | None:
        """None, since these are not quantised."""
        return None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        return self.change(self.of.read(part)).reshape(self.shape)

    def read_quantised(self, part: int | None) -> Quantised:
        """An error, since there is no form."""
        raise TypeError("the tensor has other values, and is never quantised")


def _minus_one(values: np.ndarray) -> np.ndarray:
    """The file has 1 + w, for a norm that multiplies by 1 + w."""
    return values - np.float32(1)


def _log_of_rates(stored_as: str, tensor: GGUFTensor, values: np.ndarray) -> np.ndarray:
    """The file has -exp of the logarithm."""
    if not (values < 0).all():
        raise CheckpointError(
            f"tensor {stored_as} of {tensor.path} holds numbers that are not negative; convert the "
            "model again"
        )
    return np.log(-values)


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _norm(_: str, tensor: GGUFTensor, __: DeltaHeads) -> Stored:
    return Changed(Plain(tensor), tensor.shape, _minus_one)


def _rates(stored_as: str, tensor: GGUFTensor, heads: DeltaHeads) -> Stored:
    change = partial(_log_of_rates, stored_as, tensor)
    return Changed(Moved(tensor, heads.rows(1)), tensor.shape, change)


def _taps(_: str, tensor: GGUFTensor, heads: DeltaHeads) -> Stored:
    channels, *taps = tensor.shape
    return Changed(Moved(tensor, heads.channels), (channels, 1, *taps), _same)


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
        return Changed(Plain(tensor), (count, 1, tensor.shape[-1]), _same)
    return Changed(Plain(tensor), (1, 1, count, 1), partial(_log_of_rates, stored_as, tensor))


def _row(_: str, tensor: GGUFTensor, __: DeltaHeads) -> Stored:
    """A matrix with one row, of which a file may have only the row."""
    shape = tensor.shape if len(tensor.shape) == 2 else (1, *tensor.shape)
    return Changed(Plain(tensor), shape, _same)


_CHANNELS = ("channel_rates", "channel_taps")
_READERS: Mapping[Layout, Callable[[str, GGUFTensor, DeltaHeads], Stored]] = MappingProxyType(
    {
        "norm": _norm,
        "rates": _rates,
        "heads": lambda _, tensor, heads: Moved(tensor, heads.rows(1)),
        "values": lambda _, tensor, heads: Moved(tensor, heads.rows(heads.v_dim)),
        "qkv": lambda _, tensor, heads: Moved(tensor, heads.channels),
        "taps": _taps,
        "outputs": lambda _, tensor, heads: Moved(tensor, parts=heads.order),
        "row": _row,
    }
)
