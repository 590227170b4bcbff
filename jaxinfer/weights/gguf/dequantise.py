"""Which types of tensors can be read, and their values.

Owns: plain types as numpy knows them, others by the ``gguf`` package, and the error for types that
neither knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.gguf.blocks import FORMS
from jaxinfer.weights.gguf.types import BLOCK_SIZES, TensorType

PLAIN_DTYPES: Mapping[TensorType, Any] = MappingProxyType(
    {
        TensorType.F32: np.float32,
        TensorType.F16: np.float16,
        TensorType.BF16: ml_dtypes.bfloat16,
    }
)


def values_of(raw: np.ndarray, kind: TensorType) -> np.ndarray:  # uint8[bytes of whole blocks]
    """The values of whole blocks: float32, or the plain type's dtype."""
    if kind in PLAIN_DTYPES:
        return raw.view(PLAIN_DTYPES[kind])
    from gguf.constants import GGMLQuantizationType  # not at a start: see ``gguf.types``
    from gguf.quants import dequantize

    # as one row: gguf loops over rows in Python
    return dequantize(raw[None], GGMLQuantizationType(kind))[0]


@cache
def can_dequantise(kind: TensorType) -> bool:
    """True if ``values_of`` knows the type."""
    if kind in FORMS:  # the package knows them too, but to import it takes 0.1 s
        return True
    try:
        values_of(np.zeros(BLOCK_SIZES[kind][1], np.uint8), kind)
    except (NotImplementedError, ValueError):  # ValueError: older versions lack the type itself
        return False
    return True


def check_type(path: Path, tensor: str, number: int) -> None:
    """Raise ``CheckpointError`` unless tensors of the type of this number can be read.

    It names the tensor of the file ``path``, its type, and the types that can be read.
    """
    known = {kind.value: kind for kind in TensorType}
    kind = known.get(number)
    if kind is not None and can_dequantise(kind):
        return
    name = f"type {number}" if kind is None else f"{kind.name} (type {number})"
    names = [one.name for one in TensorType if can_dequantise(one)]
    raise CheckpointError(
        f"tensor {tensor} of {path} is stored as {name}, which cannot be read; convert the model "
        f"to {', '.join(names[:-1])} or {names[-1]}"
    )
