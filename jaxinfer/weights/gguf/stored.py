"""How tensors of a GGUF file make one tensor of Hugging Face, with its layout and values.

Owns: ``Plain``, ``Rows``, ``KeysAndValues``, ``ExpertStack`` and ``Numbers``, and reading their
tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from jaxinfer.weights.checkpoint import read_bytes, read_chunks
from jaxinfer.weights.gguf.blocks import FORMS, convert
from jaxinfer.weights.gguf.dequantise import values_of
from jaxinfer.weights.gguf.header import GGUFTensor
from jaxinfer.weights.gguf.names import undo_interleave
from jaxinfer.weights.gguf.types import BLOCK_SIZES
from pallas_kernels.lib.quantised import Form, Quantised, quantised
from pallas_kernels.lib.shares import in_shares

_CHUNK_BYTES = 1 << 16  # per dequantisation call: its float32 values stay in the CPU cache
_CONVERTED_BYTES = 4 << 20  # read at a time where weights stay quantised; bounds temporary arrays


class Stored(Protocol):
    """One tensor of Hugging Face, and the tensors of the file that hold its values."""

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """The tensors of the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that Hugging Face stores."""
        ...

    @property
    def form(self) -> Form | None:
        """The form of a quantised matrix, or of those of a stack, that ``read_quantised`` knows."""
        ...

    def read(self, part: int | None) -> np.ndarray:  # float32
        """See ``Checkpoint.read``."""
        ...

    def read_quantised(self, part: int | None) -> Quantised:
        """See ``Checkpoint.read_quantised``."""
        ...


class Plain(NamedTuple):
    """One tensor of the file."""

    tensor: GGUFTensor
    interleaved_heads: int = 0  # heads whose rows are permuted; 0: rows are in order
    transposed: bool = False

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """See ``Stored``."""
        return (self.tensor,)

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Stored``."""
        return self.tensor.shape[::-1] if self.transposed else self.tensor.shape

    @property
    def form(self) -> Form | None:
        """See ``Stored``."""
        return FORMS.get(self.tensor.type) if len(self.tensor.shape) == 2 else None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        values = read_tensor(self.tensor)
        if self.interleaved_heads:
            values = undo_interleave(values, self.interleaved_heads)
        values = values.T if self.transposed else values
        return values if part is None else values[part]  # of norms of heads, a row

    def read_quantised(self, part: int | None) -> Quantised:
        """See ``Stored``."""
        assert part is None, "only stacks have parts"
        made = converted(self.tensor)
        if self.interleaved_heads:
            made = {n: undo_interleave(part, self.interleaved_heads) for n, part in made.items()}
        return quantised(made)


class KeysAndValues(NamedTuple):
    """kv_b_proj of latent attention: in the file keys and values apart, and keys transposed."""

    keys: GGUFTensor  # [N, C, K]
    values: GGUFTensor  # [N, V, C]

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """See ``Stored``."""
        return tuple(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Stored``; the rows of a head are those of its key, then those of its value."""
        (heads, rank, key_dim), value_dim = self.keys.shape, self.values.shape[1]
        return (heads * (key_dim + value_dim), rank)

    @property
    def form(self) -> Form | None:
        """None, since both are divided at load and never quantised."""
        return None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        assert part is None, "only stacks have parts"
        keys, values = (read_tensor(tensor) for tensor in self)
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.shape)

    def read_quantised(self, part: int | None) -> Quantised:
        """An error, since there is no form."""
        raise TypeError("keys and values are divided at load, and never quantised")


class Rows(NamedTuple):
    """The rows of one tensor behind those of another, with as many inputs.

    ``interleaved_heads`` are the heads of each whose rows are permuted; 0: they are in order.
    """

    tensors: tuple[GGUFTensor, ...]
    interleaved_heads: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Stored``."""
        return (sum(one.shape[0] for one in self.tensors), *self.tensors[0].shape[1:])

    @property
    def form(self) -> Form | None:
        """See ``Stored``; None if the tensors have several."""
        found = {FORMS.get(one.type) for one in self.tensors}
        return found.pop() if len(found) == 1 and len(self.shape) == 2 else None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        assert part is None, "only stacks have parts"
        return np.concatenate(
            [_in_order(read_tensor(one), heads) for one, heads in self._with_heads()]
        )

    def read_quantised(self, part: int | None) -> Quantised:
        """See ``Stored``."""
        assert part is None, "only stacks have parts"
        members = [
            {name: _in_order(array, heads) for name, array in converted(one).items()}
            for one, heads in self._with_heads()
        ]
        return quantised(_one_behind_another(members))

    def _with_heads(self) -> zip[tuple[GGUFTensor, int]]:
        heads = self.interleaved_heads or (0,) * len(self.tensors)
        return zip(self.tensors, heads, strict=True)


def _in_order(rows: np.ndarray, interleaved_heads: int) -> np.ndarray:
    return undo_interleave(rows, interleaved_heads) if interleaved_heads else rows


class Numbers(NamedTuple):
    """Numbers of the metadata, as a tensor."""

    values: np.ndarray  # float32

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """See ``Stored``."""
        return ()

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Stored``."""
        return self.values.shape

    @property
    def form(self) -> Form | None:
        """None, since they are not quantised."""
        return None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        return self.values

    def read_quantised(self, part: int | None) -> Quantised:
        """An error, since there is no form."""
        raise TypeError("numbers of the metadata are never quantised")


class ExpertStack(NamedTuple):
    """A layer's experts in one tensor, gates and ups together.

    Weights are [E, O, I] in the file and biases [E, O]. ``alternating``: rows of gates and ups
    alternate, instead of the gates being first. ``transposed``: Hugging Face has
    [E, I, outputs], unless they are quantised.
    """

    tensors: tuple[GGUFTensor, ...]  # gates and ups, or downs alone; equal shapes
    alternating: bool
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Stored``."""
        count, outputs, *inputs = self.tensors[0].shape
        all_outputs = outputs * len(self.tensors)
        if self.transposed:
            return (count, *inputs, all_outputs)
        return (count, all_outputs, *inputs)

    @property
    def form(self) -> Form | None:
        """See ``Stored``."""
        found = {FORMS.get(tensor.type) for tensor in self.tensors}
        return found.pop() if len(found) == 1 and len(self.shape) == 3 else None

    def read(self, part: int | None) -> np.ndarray:
        """See ``Stored``."""
        if part is None:
            return np.stack([self.read(number) for number in range(self.shape[0])])
        members = [read_tensor(_expert(tensor, part)) for tensor in self.tensors]
        values = _alternating(members) if self.alternating else np.concatenate(members)
        return values.T if self.transposed else values

    def read_quantised(self, part: int | None) -> Quantised:
        """See ``Stored``."""
        assert part is not None, "a stack is read expert by expert"
        members = [converted(_expert(tensor, part)) for tensor in self.tensors]
        if not self.alternating:
            return quantised(_one_behind_another(members))
        return quantised(
            {name: _alternating([one[name] for one in members]) for name in members[0]}
        )


def experts_of(stack: GGUFTensor) -> list[GGUFTensor]:
    """The matrices of a stack, one for each expert."""
    return [_expert(stack, number) for number in range(stack.shape[0])]


def halves_of(matrix: GGUFTensor) -> tuple[GGUFTensor, GGUFTensor]:
    """The first and the second half of a matrix's rows."""
    rows, nbytes = matrix.shape[0] // 2, matrix.nbytes // 2
    first = replace(matrix, shape=(rows, *matrix.shape[1:]), nbytes=nbytes)
    return first, replace(first, offset=matrix.offset + nbytes)


def _expert(stack: GGUFTensor, number: int) -> GGUFTensor:
    nbytes = stack.nbytes // stack.shape[0]
    offset = stack.offset + number * nbytes
    return replace(stack, shape=stack.shape[1:], offset=offset, nbytes=nbytes)


def _alternating(parts: list[np.ndarray]) -> np.ndarray:  # [O, ...] each -> [O * parts, ...]
    """The rows of the parts in turn: the first of each, the second of each, ..."""
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def _one_behind_another(members: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of a matrix with the rows of all of these."""
    return {name: np.concatenate([one[name] for one in members]) for name in members[0]}


def read_tensor(tensor: GGUFTensor) -> np.ndarray:  # float32[tensor.shape]
    """Dequantise chunk by chunk into the result, so that no second copy of it exists."""
    values_per_unit, bytes_per_unit = BLOCK_SIZES[tensor.type]
    values = np.empty(tensor.nbytes // bytes_per_unit * values_per_unit, np.float32)
    chunk_bytes = _CHUNK_BYTES // bytes_per_unit * bytes_per_unit
    for start in range(0, tensor.nbytes, chunk_bytes):
        count = min(chunk_bytes, tensor.nbytes - start)
        raw = read_bytes(tensor.path, tensor.offset + start, count)
        first = start // bytes_per_unit * values_per_unit
        chunk = values_of(raw, tensor.type)
        values[first : first + len(chunk)] = chunk
    return values.reshape(tensor.shape)


def converted(tensor: GGUFTensor) -> dict[str, np.ndarray]:
    """The arrays of a quantised matrix, converted a few rows at a time."""
    outputs, inputs = tensor.shape
    row_bytes = tensor.nbytes // outputs
    arrays = FORMS[tensor.type].arrays(outputs, inputs)
    made = {part: np.empty(*array) for part, array in arrays.items()}
    size = max(1, _CONVERTED_BYTES // row_bytes) * row_bytes

    def convert_rows(share: slice) -> None:
        done, count = share.start, share.stop - share.start
        for raw in read_chunks(
            tensor.path, tensor.offset + done * row_bytes, count * row_bytes, size
        ):
            rows = raw.reshape(-1, row_bytes)
            into = {part: array[done : done + len(rows)] for part, array in made.items()}
            convert(tensor.type, rows, into)
            done += len(rows)

    in_shares(outputs, 1, tensor.nbytes, convert_rows)
    return made
