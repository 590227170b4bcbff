"""The checkpoint tensors that parameters are made of, and the arrays that they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.nn.placement import Axes
from pallas_kernels.lib.quantised import Form, Quantised

type Shape = tuple[int, ...]


class RotaryRows(NamedTuple):
    """The order of a tensor's rows for heads that rotate in part, or by adjacent components.

    The kernels rotate component i of a head with i + H/2. In checkpoints only the first ``rotated``
    components of each head rotate: i with i + rotated/2, or if ``interleaved`` 2i with 2i + 1. The
    same order of queries and keys changes no score, so that the rows of both are put where the
    kernels have them, when weights are read. The rows behind those of ``heads`` heads stay.
    """

    heads: int
    head_dim: int
    rotated: int
    interleaved: bool = False

    def order(self, num_rows: int) -> np.ndarray:  # int[num_rows]
        """For each row of the parameter, the row of the tensor."""
        head, r, rest = np.arange(self.head_dim), self.rotated, (self.head_dim - self.rotated) // 2
        pairs = (head[0:r:2], head[1:r:2]) if self.interleaved else np.split(head[:r], 2)
        first, second = pairs
        one = np.concatenate([first, head[r : r + rest], second, head[r + rest :]])
        heads = (np.arange(self.heads)[:, None] * self.head_dim + one).reshape(-1)
        return np.concatenate([heads, np.arange(len(heads), num_rows)])


class PackedHeads(NamedTuple):
    """The order of rows of a tensor that has several parts of each head together: of each head its
    query and its gate, or of each KV head its queries, its key and its value.

    The parameter has a part of all heads, then the next one, in the order ``parts`` (empty: as they
    are). ``rotary`` has the orders of the rows within the parts (empty: as they are).
    """

    heads: int
    widths: tuple[int, ...]
    parts: tuple[int, ...] = ()
    rotary: tuple[RotaryRows | None, ...] = ()

    def order(self, num_rows: int) -> np.ndarray:  # int[num_rows]
        """For each row of the parameter, the row of the tensor."""
        rows = np.arange(num_rows).reshape(self.heads, sum(self.widths))
        packed = np.split(rows, np.cumsum(self.widths)[:-1], axis=1)
        found = [packed[part].reshape(-1) for part in self.parts or range(len(packed))]
        for part, rotary in enumerate(self.rotary):
            if rotary is not None:
                found[part] = found[part][rotary.order(len(found[part]))]
        return np.concatenate(found)


type RowOrder = RotaryRows | PackedHeads


class Source(NamedTuple):
    """A checkpoint tensor by its Hugging Face name, with its required shape.

    ``build`` receives an array, or with a ``form`` the ``Quantised`` matrix as it is stored. With
    ``part`` the tensor is a stack, and the source is only this part along its first dimension. With
    ``rows`` it receives the rows in that order.
    """

    name: str
    shape: Shape
    form: Form | None = None
    part: int | None = None
    rows: RowOrder | None = None

    @property
    def own_shape(self) -> Shape:
        """The shape of what ``build`` receives."""
        return self.shape if self.part is None else self.shape[1:]

    def ordered(self, tensor: Any) -> Any:
        """The tensor, an array or ``Quantised``, with its rows in the order of ``rows``."""
        if self.rows is None:
            return tensor
        order = self.rows.order(self.own_shape[0])
        return tensor.rows(order) if isinstance(tensor, Quantised) else tensor[order]

    def unordered(self, array: np.ndarray) -> np.ndarray:
        """The inverse of ``ordered``."""
        if self.rows is None:
            return array
        return array[np.argsort(self.rows.order(self.own_shape[0]))]


@dataclass(frozen=True)
class ArraySpec:
    """One array of a module, with the logical axis of each dimension."""

    shape: Shape
    axes: Axes
    dtype: jnp.dtype | None = None  # None: the model's dtype

    def __post_init__(self) -> None:
        """Check that every dimension has an axis."""
        assert len(self.axes) == len(self.shape), f"axes {self.axes} of shape {self.shape}"

    @property
    def nbytes(self) -> int:
        """Bytes of an array whose dtype is set."""
        assert self.dtype is not None, "the model decides the dtype"
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
