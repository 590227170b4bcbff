"""Parameter specs: the arrays of a parameter, its checkpoint tensors, and how it is built.

Owns: ``ParamSpec``, the ``build`` functions that families share, and paths ("layers_0/qkv") of
parameters in the nested dict that Flax uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.division import SourceShare, on_devices, own_part, source_shares
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.placement import Axis, is_divided
from pallas_kernels.lib.quantised import Form


@dataclass(frozen=True)
class Division:
    """The devices among which a parameter is divided, and its arrays before that."""

    devices: int
    whole: ArraySpec | Mapping[str, ArraySpec]


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
    With ``any_rows`` the sources together are the rows of ``build``'s only argument, and a file may
    divide them among the tensors otherwise.
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
    any_rows: bool = False
    division: Division | None = None  # if the arrays are those of several devices

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

    def on(self, devices: int) -> ParamSpec:
        """The parameter on so many devices; its arrays are those of all of them."""
        if devices == 1:
            return self
        arrays = _mapped(lambda whole: on_devices(whole, devices), self.arrays)
        return replace(self, arrays=arrays, division=Division(devices, self.arrays))

    @property
    def devices(self) -> int:
        """The number of devices among which it is divided."""
        return 1 if self.division is None else self.division.devices

    @property
    def wholes(self) -> dict[str, ArraySpec]:
        """The arrays by path before they were divided; of a quantised matrix those of floats."""
        whole = self.arrays if self.division is None else self.division.whole
        return by_path({self.path: whole})

    @property
    def is_replicated(self) -> bool:
        """True if every device has the whole parameter."""
        return not any(is_divided(axis) for leaf in self.leaves.values() for axis in leaf.axes)

    @cached_property
    def shares(self) -> tuple[SourceShare, ...]:
        """The parts that devices have of the sources of a divided matrix, or of a piece of it."""
        assert self.division is not None, f"{self.path} is not divided"
        sizes = [self.size_of(source) for source in self.sources[: self.sources_per_piece]]
        axes, interleaved = self.matrix_axes, self.interleaved
        return source_shares(*axes, sizes, self.division.devices, interleaved=interleaved)

    def ranks_of(self, piece: int) -> range:
        """The numbers of the devices that have a part of a piece."""
        if self.pieces is None or next(iter(self.leaves.values())).axes[0] is None:
            return range(self.devices)
        rank = piece // (self.pieces // self.devices)
        return range(rank, rank + 1)

    @property
    def matrix_axes(self) -> tuple[Axis, Axis]:
        """The axes of a matrix's outputs and inputs, as the family declares them."""
        (declared,) = self.wholes.values()
        first, second = declared.axes[-2:]
        return (second, first) if self.matrix in ("out_in", "in_out") else (first, second)

    def size_of(self, source: Source) -> tuple[int, int]:
        """Outputs and inputs of a tensor of a matrix."""
        first, second = source.own_shape
        return (second, first) if self.is_by_inputs else (first, second)

    @property
    def is_by_inputs(self) -> bool:
        """True if sources of floats are stored [I, O]."""
        return self.matrix in ("in_out", "experts_in_out")

    def own_forms(self, sources: Sequence[Source]) -> list[Form | None]:
        """The forms of a device's part of sources, those of the parameter or of one piece."""
        forms = [source.form for source in sources]
        if self.division is None or self.matrix is None:
            return forms
        if forms != [source.form for source in self.sources[: self.sources_per_piece]]:
            return self._forms_of(sources)
        return self._first_forms

    @cached_property
    def _first_forms(self) -> list[Form | None]:
        """Those of the first piece, which others mostly have too."""
        return self._forms_of(self.sources[: self.sources_per_piece])

    def _forms_of(self, sources: Sequence[Source]) -> list[Form | None]:
        pairs = zip(sources, self.shares, strict=True)
        return [one.form and share.form(one.form, one.name) for one, share in pairs]

    def own_sizes(self, sources: Sequence[Source]) -> list[tuple[int, int]]:
        """Outputs and inputs of a device's part of sources of a matrix, or of one piece."""
        sizes = [self.size_of(source) for source in sources]
        if self.division is None:
            return sizes
        return [share.size(*size) for size, share in zip(sizes, self.shares, strict=True)]

    def built(self, tensors: Iterable[Any], piece: int = 0, rank: int = 0) -> Any:
        """The result of ``build`` for the tensors of a piece, or of all, as they are stored; of a
        divided parameter for the part of one device.
        """
        count = self.sources_per_piece
        own = self.sources[piece * count : (piece + 1) * count]
        given = [source.ordered(tensor) for source, tensor in zip(own, tensors, strict=True)]
        if self.division is None or self.is_replicated:
            return self.build(*given)
        if self.matrix is not None:
            triples = zip(given, self.shares, self.own_forms(own), strict=True)
            parts = (
                share.take(tensor, rank, form, by_inputs=self.is_by_inputs)
                for tensor, share, form in triples
            )
            return self.build(*parts)
        devices = self.division.devices

        def own_leaf(whole: ArraySpec, made: Any) -> Any:
            if self.pieces is not None:
                whole = replace(whole, shape=whole.shape[1:], axes=whole.axes[1:])
            return own_part(made, whole, devices, rank)

        return _mapped(own_leaf, self.division.whole, self.build(*given))


def _mapped(function: Callable[..., Any], arrays: Any, *others: Any) -> Any:
    """The tree of what a function makes of each array of a tree, and of others like it."""
    if isinstance(arrays, Mapping):
        names: Iterable[str] = arrays
        return {n: _mapped(function, arrays[n], *(other[n] for other in others)) for n in names}
    return function(arrays, *others)


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


def stack_flat(*tensors: np.ndarray) -> np.ndarray:  # of E elements each -> [number, E]
    """Tensors of as many elements as one parameter, a row each."""
    return np.stack([tensor.reshape(-1) for tensor in tensors])


def plus_one(weight: np.ndarray) -> np.ndarray:  # [D] -> float32[D]
    """The weight of a norm whose checkpoint stores the weight minus 1."""
    return 1.0 + weight.astype(np.float32)


def stack_plus_one(*weights: np.ndarray) -> np.ndarray:  # [D] each -> float32[number of them, D]
    """Stack the weights of norms whose checkpoint stores the weight minus 1."""
    return _module(weights).stack([plus_one(weight) for weight in weights])


def stack(*tensors: np.ndarray) -> np.ndarray:  # [D] each -> [number of tensors, D]
    """Stack the weights of norms."""
    return _module(tensors).stack(tensors)


def affine_plus_one(*tensors: np.ndarray) -> np.ndarray:  # [D] each -> float32[number, D]
    """Stack weights and biases of norms in turn; the checkpoint stores the weights minus 1."""
    made = [plus_one(one) if i % 2 == 0 else one for i, one in enumerate(tensors)]
    return _module(tensors).stack([one.astype(np.float32) for one in made])


def _minus_one(array: np.ndarray, _: object = None) -> list[np.ndarray]:
    """The inverse of ``affine_plus_one``."""
    return [one - np.float32(1) if i % 2 == 0 else one for i, one in enumerate(array)]


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
    """Outputs that alternate between gates and ups, with all gates before all ups."""
    return _module((interleaved,)).concat([interleaved[::2], interleaved[1::2]])


def transposed_gates_first(weight: np.ndarray) -> np.ndarray:  # [in, out] -> [out, in]
    """``gates_first`` of the transpose."""
    return gates_first(weight.T)


def _interleaved_gates(array: np.ndarray, _: object = None) -> list[np.ndarray]:
    """The inverse of ``gates_first``."""
    return [np.stack(np.split(array, 2), axis=1).reshape(array.shape)]


def _split_outputs(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    ends = np.cumsum([source.own_shape[0] for source in sources])[:-1]
    return [part.T for part in np.split(array, ends, axis=1)]


def _split(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    return np.split(array, np.cumsum([source.own_shape[0] for source in sources])[:-1])


def _rows_of(array: np.ndarray, sources: Sequence[Source]) -> list[np.ndarray]:
    return [row.reshape(source.shape) for row, source in zip(array, sources, strict=True)]


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
        affine_plus_one: _minus_one,
        transposed: lambda array, _: [array.T],
        conv_taps: lambda array, to: [taps[:, None] for taps in _split_outputs(array, to)],
        join_flat: _split_flat,
        stack_flat: _rows_of,
        gates_first: _interleaved_gates,
        transposed_gates_first: lambda array, _: [_interleaved_gates(array)[0].T],
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
