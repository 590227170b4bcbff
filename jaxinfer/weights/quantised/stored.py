"""The tensors that make up a quantised matrix, and the checks of their headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.checkpoint import TensorInfo
from pallas_kernels.lib.quantised import Form, Quantised

type Read = Callable[[str], np.ndarray]
type Shape = tuple[int, ...]

DTYPES: Mapping[str, str] = MappingProxyType(  # of scales
    {
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "F8_E8M0": "bfloat16",  # powers of 2, exact in bfloat16
    }
)
CHECK_CONFIG = "check that config.json belongs to these weights"


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix of a checkpoint, or a stack of equal ones.

    ``load`` reads it in the form; ``check`` reads small tensors that say whether the form is right,
    and raises ``CheckpointError`` if it is not.
    """

    form: Form
    shape: Shape  # [O, I]; of a stack [E, I, O], as stacks of floats are
    names: tuple[str, ...]  # of its tensors
    load: Callable[[Read], Quantised]
    check: Callable[[Read], None] | None = None


class Parts:
    """The tensors of one module by their role, such as ".scales"; records which were used."""

    def __init__(self, module: str, tensors: Mapping[str, TensorInfo]) -> None:
        self._module = module
        self._tensors = tensors  # of the checkpoint
        self._used: list[str] = []

    def has(self, role: str) -> bool:
        """True if the matrix has a tensor of this role."""
        return self.name(role) in self._tensors

    def name(self, role: str) -> str:
        """The tensor's name in the checkpoint."""
        return self._module + role

    def take(self, role: str, dtypes: tuple[str, ...], *shapes: Shape) -> TensorInfo:
        """The header of a tensor, which must have one of these dtypes and shapes (any if none).

        Raises ``CheckpointError`` that names the tensor.
        """
        if not self.has(role):
            raise CheckpointError(
                f"the checkpoint has no tensor {self.name(role)}, which the quantised weight of "
                f"{self._module} needs; {CHECK_CONFIG}"
            )
        name = self.name(role)
        info = self._tensors[name]
        self._used.append(name)
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} is stored as {info.dtype} instead of {' or '.join(dtypes)}; "
                f"{CHECK_CONFIG}"
            )
        if shapes and info.shape not in shapes:
            raise CheckpointError(
                f"tensor {name} has shape {info.shape} instead of {shapes[-1]}; {CHECK_CONFIG}"
            )
        return info

    def matrix(self, role: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """The shape of a tensor of two dimensions, not empty."""
        shape = self.take(role, dtypes).shape
        if len(shape) != 2 or not all(shape):
            raise CheckpointError(
                f"tensor {self.name(role)} has shape {shape} instead of that of a matrix; "
                f"{CHECK_CONFIG}"
            )
        return shape[0], shape[1]

    def stored(
        self,
        role: str,
        form: Form,
        shape: Shape,
        load: Callable[[Read], Quantised],
        check: Callable[[Read], None] | None = None,
    ) -> StoredMatrix:
        """The matrix of the tensors that were taken; ``role`` is the tensor of its values."""
        check_fits(self.name(role), form, *(shape if len(shape) == 2 else shape[:0:-1]))
        return StoredMatrix(form, shape, tuple(self._used), load, check)


def check_fits(tensor: str, form: Form, outputs: int, inputs: int) -> None:
    """Raise ``CheckpointError`` with the tensor's name unless the form can hold the matrix."""
    try:
        form.arrays(outputs, inputs)
    except ValueError as error:
        raise CheckpointError(
            f"tensor {tensor} cannot be kept as {form}: {error}; use another checkpoint of this "
            "model"
        ) from error


def form_of(
    kind: str,
    inputs: int,
    groups: int,
    scale_dtype: str,
    *,
    zeros: bool,
    block_outputs: int = 1,  # that share scales
) -> Form:
    """The form of a matrix; with one group there is a scale for each row.

    Scales of fp8 are float32, which holds all stored ones exactly: kernels read float32, and a
    conversion would be one more launch in each call.

    An int8 matrix with zero points has offsets instead, since zero points minus 128 do not fit into
    uint8. In float32 the offset -zero * scale is exact for scales in float16 and bfloat16; with
    scales in float32 it is rounded.
    """
    group = None if groups == 1 else inputs // groups
    if kind == "int8" and zeros:
        return Form(kind, group, "float32", offsets=True)
    dtype = "float32" if kind == "fp8" else scale_dtype
    return Form(kind, group, dtype, zeros=zeros, block_outputs=block_outputs)


def int8_with_zeros(
    values: np.ndarray,  # int8[O, K]
    scales: np.ndarray,  # [O, G]
    zeros: np.ndarray,  # int8[O, G]
) -> Quantised:
    """See ``form_of``."""
    wide = scales.astype(np.float32)
    return Quantised("int8", values, wide, offsets=-zeros.astype(np.float32) * wide)


def check_order(name: str, inputs: int, group: int | None, read: Read) -> None:
    """Raise ``CheckpointError`` unless the groups of inputs are in order, or all -1 (unset)."""
    order = read(name)
    expected = np.arange(inputs) // (group or inputs)
    if not (np.array_equal(order, expected) or (order == -1).all()):
        raise CheckpointError(
            f"tensor {name} has inputs in the order of their activations (desc_act, actorder), "
            "which is not supported; use a checkpoint that was quantised without it"
        )


def check_zeros(name: str, zeros: np.ndarray, expected: int) -> None:
    """Raise ``CheckpointError`` unless all zero points have the value of a symmetric matrix."""
    if (zeros != expected).any():
        raise CheckpointError(
            f"tensor {name} has zero points other than {expected} although config.json says that "
            f"weights are symmetric; {CHECK_CONFIG}"
        )
