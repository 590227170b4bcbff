"""Tensors whose values, shapes or order of rows differ from Hugging Face's.

Owns: ``Moved`` and ``Changed``, and one function for each layout of ``names.Layout`` that several
families have; ``hybrid`` has those of the gated delta rule. Source: the conversion scripts of
llama.cpp (``conversion/``), read backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.blocks import FORMS
from jaxinfer.weights.gguf.header import GGUFTensor
from jaxinfer.weights.gguf.names import Layout
from jaxinfer.weights.gguf.stored import Plain, Stored, converted, read_tensor
from pallas_kernels.lib.quantised import PACKED, Form, Quantised, nibble_block, quantised

type Named = Iterator[tuple[str, Stored]]  # tensors of Hugging Face, by their names


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


def same(values: np.ndarray) -> np.ndarray:
    """The values as they are, for another shape."""
    return values


def _minus_one(values: np.ndarray) -> np.ndarray:
    """The file has 1 + w, for a norm that multiplies by 1 + w."""
    return values - np.float32(1)


def log_of_rates(stored_as: str, tensor: GGUFTensor) -> Callable[[np.ndarray], np.ndarray]:
    """The logarithm of rates, of which the file has -exp.

    The function raises ``CheckpointError`` for rates that are not negative.
    """

    def logarithm(values: np.ndarray) -> np.ndarray:
        if not (values < 0).all():
            raise CheckpointError(
                f"tensor {stored_as} of {tensor.path} holds numbers that are not negative; convert "
                "the model again"
            )
        return np.log(-values)

    return logarithm


def changed_tensors(
    layout: Layout, name: str, stored_as: str, tensor: GGUFTensor, heads: tuple[int, int]
) -> Named:
    """The tensors of Hugging Face that a tensor of the file holds.

    ``name`` is its name there, and ``stored_as`` the one in the file; ``heads`` are the numbers of
    heads and of KV heads. Raises ``CheckpointError`` if its shape does not fit the heads.
    """
    if layout in ("packed", "query_key_value"):
        yield from _of_heads(layout, name, stored_as, tensor, heads)
    elif layout == "each_head":
        for i in range(tensor.shape[0]):
            yield name.format(i), Changed(Moved(tensor, np.array([i])), tensor.shape[1:], same)
    elif layout == "log_rates":
        yield name, Changed(Plain(tensor), _rates(tensor), log_of_rates(stored_as, tensor))
    else:
        shape, change = _SHAPES[layout]
        yield name, Changed(Plain(tensor), shape(tensor.shape), change)


def _of_heads(
    layout: Layout, name: str, stored_as: str, tensor: GGUFTensor, heads: tuple[int, int]
) -> Named:
    """Queries, then keys, then values, which Hugging Face has by KV heads or in three tensors."""
    num_heads, num_kv = heads
    rows, units = tensor.shape[0], num_heads + 2 * num_kv
    if rows % units or num_heads % num_kv:
        raise CheckpointError(
            f"tensor {stored_as} of {tensor.path} has shape {tensor.shape}, and {num_heads} heads "
            f"with {num_kv} KV heads need a multiple of {units} rows; convert the model again"
        )
    width = rows // units
    ends = [num_heads * width, (num_heads + num_kv) * width]
    q, k, v = np.split(np.arange(rows), ends)
    if layout == "query_key_value":
        for part, own in zip("qkv", (q, k, v), strict=True):
            yield name.format(part), Moved(tensor, own)
        return
    together = [part.reshape(num_kv, -1) for part in (q, k, v)]
    yield name, Moved(tensor, np.concatenate(together, axis=1).reshape(-1))


def _rates(tensor: GGUFTensor) -> tuple[int, ...]:
    """The shape of logarithms: [H] of heads, which the file has as [H, 1]; [D, N] of channels."""
    return tensor.shape[:1] if tensor.shape[1:] == (1,) else tensor.shape


type _Shape = Callable[[tuple[int, ...]], tuple[int, ...]]
_SHAPES: Mapping[Layout, tuple[_Shape, Callable[[np.ndarray], np.ndarray]]] = MappingProxyType(
    {
        "norm": (lambda shape: shape, _minus_one),
        "flat": (lambda shape: (math.prod(shape),), same),
        # a matrix with one row, of which a file may have only the row
        "row": (lambda shape: shape if len(shape) == 2 else (1, *shape), same),
        "conv": (lambda shape: (shape[0], 1, *shape[1:]), same),
        # the rows of all experts' matrices [E, O, I], and their columns
        "experts_rows": (lambda shape: (math.prod(shape[:-1]), *shape[-1:]), same),
        "experts_columns": (
            lambda shape: (math.prod(shape[:1] + shape[2:]), *shape[1:2]),
            lambda values: np.moveaxis(values, 1, -1),
        ),
    }
)
