"""Parameter specs: the arrays of a parameter, its checkpoint tensors, and how it is built.

Owns: ``ParamSpec``, the ``build`` functions that families share, and paths ("layers_0/qkv") of
parameters in the nested dict that Flax uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import ConfigError
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
    query and its gate.

    The parameter has a part of all heads, then the next one, in the order ``parts`` (empty: as they
    are). ``rotary`` is the order of the rows of the last of these.
    """

    heads: int
    widths: tuple[int, ...]
    parts: tuple[int, ...] = ()
    rotary: RotaryRows | None = None

    def order(self, num_rows: int) -> np.ndarray:  # int[num_rows]
        """For each row of the parameter, the row of the tensor."""
        rows = np.arange(num_rows).reshape(self.heads, sum(self.widths))
        packed = np.split(rows, np.cumsum(self.widths)[:-1], axis=1)
        found = [packed[part].reshape(-1) for part in self.parts or range(len(packed))]
        if self.rotary is not None:
            found[-1] = found[-1][self.rotary.order(len(found[-1]))]
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
        order = self.rows.order(self.shape[0])
        return tensor.rows(order) if isinstance(tensor, Quantised) else tensor[order]

    def unordered(self, array: np.ndarray) -> np.ndarray:
        """The inverse of ``ordered``."""
        if self.rows is None:
            return array
        return array[np.argsort(self.rows.order(self.shape[0]))]


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


@dataclass(frozen=True)
class ParamSpec:
    """One parameter and how it is built from checkpoint tensors.

    ``path`` is its path in the params tree, joined by "/". A parameter is an array or, for a
    quantised weight, a dict of arrays (values, scales). ``build`` receives the tensors in the order
    of ``sources`` and returns the array or the dict. It transposes and concatenates, and converts
    stored values where a family defines it (Gemma's norms).

    With ``pieces`` the parameter is a stack: ``build`` is called for each piece along the first
    dimension, in order, with an equal number of the sources, and returns the piece without that
    dimension. Host memory then holds only single pieces.

    ``finish`` makes the parameter, or a piece of it, of what ``build`` returned, on the devices,
    with the same shapes.
    ``matrix`` says that the sources are weights of products, which may stay quantised
    (``models.quantised``), and how the array and its sources are laid out:

        out_in  [I, O] of sources [O_i, I]     in_out  [I, O] of one source [I, O]
        rows    [O, I] of one source [O, I]: an embedding

    and of a stack of E pieces

        experts         [E, O, I]; a piece of sources [O_i, I]
        experts_in_out  [E, O, I]; a piece of one source [I, O]. With ``interleaved`` its outputs
                        are of a gate and an up in turn
    """

    path: str
    arrays: ArraySpec | Mapping[str, ArraySpec]
    sources: tuple[Source, ...]
    build: Callable[..., Any]  # arrays, or Quantised -> an array, or a dict of arrays
    pieces: int | None = None
    finish: Callable[[Any], Any] | None = None
    matrix: Literal["out_in", "in_out", "rows", "experts", "experts_in_out"] | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Check that the pieces have equal numbers of sources."""
        if self.pieces is not None:
            assert len(self.sources) % self.pieces == 0, f"{self.path}: sources of unequal pieces"
            assert {spec.shape[0] for spec in self.leaves.values()} == {self.pieces}, self.path

    @cached_property
    def leaves(self) -> dict[str, ArraySpec]:
        """The arrays by path."""
        return by_path({self.path: self.arrays})

    @property
    def is_linear(self) -> bool:
        """True if the sources are weights [O, I] of linear layers."""
        return self.matrix in ("out_in", "experts")

    @property
    def sources_per_piece(self) -> int:
        """The number of tensors that one call of ``build`` receives."""
        return len(self.sources) // (self.pieces or 1)

    def built(self, tensors: Iterable[Any], piece: int = 0) -> Any:
        """The result of ``build`` for the tensors of a piece, or of all, as they are stored."""
        count = self.sources_per_piece
        own = self.sources[piece * count : (piece + 1) * count]
        return self.build(
            *(source.ordered(tensor) for source, tensor in zip(own, tensors, strict=True))
        )


def as_is(tensor: np.ndarray) -> np.ndarray:
    """Return the tensor unchanged."""
    return tensor


# Arrays of files are numpy's, a trainer's are JAX's, and also these must not be copied to the host:
# hence the functions of the array's own module (the array API standard).


def join_outputs(*weights: np.ndarray) -> np.ndarray:  # [out_i, in] each -> [in, sum of out_i]
    """Transpose linear weights from [out, in] to [in, out] and concatenate their outputs."""
    return _module(weights).concat([weight.T for weight in weights], axis=1)


def join(*tensors: np.ndarray) -> np.ndarray:  # [out_i] each -> [sum of out_i]
    """Concatenate biases."""
    return _module(tensors).concat(tensors)


def plus_one(weight: np.ndarray) -> np.ndarray:  # [D] -> float32[D]
    """The weight of a norm whose checkpoint stores the weight minus 1."""
    return 1.0 + weight.astype(np.float32)


def stack_plus_one(*weights: np.ndarray) -> np.ndarray:  # [D] each -> float32[number of them, D]
    """Stack the weights of norms whose checkpoint stores the weight minus 1."""
    return _module(weights).stack([plus_one(weight) for weight in weights])


def stack(*tensors: np.ndarray) -> np.ndarray:  # [D] each -> [number of tensors, D]
    """Stack the weights of norms."""
    return _module(tensors).stack(tensors)


def _module(arrays: Sequence[np.ndarray]) -> Any:
    return arrays[0].__array_namespace__()


def transposed(weight: np.ndarray) -> np.ndarray:  # [in, out] -> [out, in]
    """Transpose a weight."""
    return weight.T


def conv_taps(*weights: np.ndarray) -> np.ndarray:  # [C_i, 1, W] each -> [W, sum of C_i]
    """The taps of convolutions of single channels."""
    return join_outputs(*(weight[:, 0] for weight in weights))


def join_flat(*tensors: np.ndarray) -> np.ndarray:  # of any shapes -> [sum of elements]
    """Concatenate all elements."""
    return join(*(tensor.reshape(-1) for tensor in tensors))


def gates_first(interleaved: np.ndarray) -> np.ndarray:  # [O, ...] -> [O, ...]
    """Outputs that are of a gate and an up in turn, with all gates before all ups."""
    return _module((interleaved,)).concat([interleaved[::2], interleaved[1::2]])


def transposed_gates_first(weight: np.ndarray) -> np.ndarray:  # [in, out] -> [out, in]
    """``gates_first`` of the transpose."""
    return gates_first(weight.T)


def _in_turn(array: np.ndarray, _: object = None) -> list[np.ndarray]:
    """The inverse of ``gates_first``."""
    return [np.stack(np.split(array, 2), axis=1).reshape(array.shape)]


def _split_outputs(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    ends = np.cumsum([source.shape[0] for source in sources])[:-1]
    return [part.T for part in np.split(array, ends, axis=1)]


def _split(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    return np.split(array, np.cumsum([source.shape[0] for source in sources])[:-1])


def _split_flat(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    ends = np.cumsum([math.prod(source.shape) for source in sources])[:-1]
    parts = zip(np.split(array, ends), sources, strict=True)
    return [part.reshape(source.shape) for part, source in parts]


# of a matrix that is not quantised, by ``matrix`` and ``interleaved``
_BUILDS: Mapping[tuple[str, bool], Callable[..., np.ndarray]] = MappingProxyType(
    {
        ("out_in", False): join_outputs,
        ("in_out", False): as_is,
        ("rows", False): as_is,
        ("experts", False): join,
        ("experts_in_out", False): transposed,
        ("experts_in_out", True): transposed_gates_first,
    }
)
# of each function that families build with; ``minus one`` is exact for 1 + w of a stored w
_INVERSES: Mapping[Callable[..., Any], Callable[..., list[np.ndarray]]] = MappingProxyType(
    {
        as_is: lambda array, _: [array],
        join_outputs: _split_outputs,
        join: _split,
        stack: lambda array, _: list(array),
        plus_one: lambda array, _: [array - np.float32(1)],
        stack_plus_one: lambda array, _: list(array - np.float32(1)),
        transposed: lambda array, _: [array.T],
        conv_taps: lambda array, to: [taps[:, None] for taps in _split_outputs(array, to)],
        join_flat: _split_flat,
        gates_first: _in_turn,
        transposed_gates_first: lambda array, _: [_in_turn(array)[0].T],
    }
)


def tensors_of(spec: ParamSpec, array: Any) -> list[np.ndarray]:
    """The checkpoint tensors of a parameter's array, in the order of its sources: the inverse of
    ``build``, for a parameter that is one array (a quantised one is dequantised before), or a dict
    of them that ``build`` made of one tensor. Parts of a stacked tensor are separate.

    Raises ``ConfigError`` for a family's own ``build`` function, unless it has an ``inverse``.
    """
    build = spec.build if spec.matrix is None else _BUILDS[spec.matrix, spec.interleaved]
    inverse = getattr(build, "inverse", None) or _INVERSES.get(build)
    if inverse is None:
        raise ConfigError(
            f"parameter {spec.path} cannot be saved, as nothing is known to reverse "
            f"{getattr(build, '__name__', build)}; add its inverse to models.params"
        )
    if spec.pieces is None:
        found = inverse(array, spec.sources)
    else:
        count = spec.sources_per_piece
        sources = (spec.sources[i * count : (i + 1) * count] for i in range(spec.pieces))
        pieces = zip(array, sources, strict=True)
        found = [tensor for piece, own in pieces for tensor in inverse(piece, own)]
    return [s.unordered(tensor) for s, tensor in zip(spec.sources, found, strict=True)]


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of leaves that are given by path."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return tree


def by_path(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a nested dict by path."""
    return dict(_leaves(tree, ""))


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in tree.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{name}/")
        else:
            yield prefix + name, inner
