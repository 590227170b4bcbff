"""What a parameter is: its arrays, the checkpoint tensors that it is made from, and how.

Owns: ``ParamSpec``, and the ``build`` functions that families share, which only move data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.models.tree import by_path
from jaxinfer.nn.placement import Axes

type Shape = tuple[int, ...]


class Source(NamedTuple):
    """A checkpoint tensor by Hugging Face's name, with the shape that it must have."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class ArraySpec:
    """One array: what the module declares, and the logical axis of each dimension."""

    shape: Shape
    axes: Axes
    dtype: jnp.dtype | None = None  # None: the model's

    def __post_init__(self) -> None:
        """Every dimension has an axis."""
        assert len(self.axes) == len(self.shape), f"axes {self.axes} of shape {self.shape}"


@dataclass(frozen=True)
class ParamSpec:
    """How one parameter is made from checkpoint tensors.

    ``path`` is the place in the params tree, joined by "/". A parameter is an array or, as a
    quantised weight, a dict of arrays (values, scales). ``build`` receives the tensors in the order
    of ``sources`` and returns the array or the dict; it moves and joins, and adds what a family
    means and does not store (Gemma's norms).

    With ``pieces`` the parameter is a stack: ``build`` is called for each piece along the first
    dimension, in order, with an equal share of the sources, and returns the piece without that
    dimension. Only pieces are then held in the memory of the host.
    """

    path: str
    arrays: ArraySpec | Mapping[str, ArraySpec]
    sources: tuple[Source, ...]
    build: Callable[..., Any]  # np.ndarray... -> np.ndarray | dict[str, np.ndarray]
    pieces: int | None = None

    def __post_init__(self) -> None:
        """Pieces share the sources equally."""
        if self.pieces is not None:
            assert len(self.sources) % self.pieces == 0, f"{self.path}: sources of unequal pieces"
            assert {spec.shape[0] for spec in self.leaves.values()} == {self.pieces}, self.path

    @cached_property
    def leaves(self) -> dict[str, ArraySpec]:
        """Its arrays by path."""
        return by_path({self.path: self.arrays})

    @property
    def sources_per_piece(self) -> int:
        """How many tensors one call of ``build`` receives."""
        return len(self.sources) // (self.pieces or 1)


def as_is(tensor: np.ndarray) -> np.ndarray:
    """The tensor itself."""
    return tensor


def join_outputs(*weights: np.ndarray) -> np.ndarray:  # [out_i, in] each -> [in, sum of out_i]
    """Linear weights side by side, turned from [out, in] to [in, out]."""
    return np.concatenate([weight.T for weight in weights], axis=1)


def join(*tensors: np.ndarray) -> np.ndarray:  # [out_i] each -> [sum of out_i]
    """Biases one after another."""
    return np.concatenate(tensors)


def one_more(weight: np.ndarray) -> np.ndarray:  # [D] -> float32[D]
    """A norm's weight that is stored less one."""
    return 1.0 + weight.astype(np.float32)


def stack_one_more(*weights: np.ndarray) -> np.ndarray:  # [D] each -> float32[number of them, D]
    """Norms on top of each other, whose weights are stored less one."""
    return np.stack([one_more(weight) for weight in weights])


def stack(*tensors: np.ndarray) -> np.ndarray:  # [D] each -> [number of tensors, D]
    """Norms on top of each other."""
    return np.stack(tensors)
