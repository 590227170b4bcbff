"""The ``Checkpoint`` protocol: named tensors with known shapes that are read one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxinfer.core.errors import CheckpointError
from pallas_kernels.quantised import Form, Quantised


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a file's header; ``shape`` is the one that Hugging Face stores."""

    shape: tuple[int, ...]
    dtype: str  # the format's own name, such as BF16 or Q4_1
    nbytes: int  # as stored
    readable: bool  # whether ``Checkpoint.read`` knows the dtype
    file: str = ""  # the file's name, where the checkpoint may have several


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names. Only headers are read before ``read``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in ``TensorInfo.shape``, as float32, float16 or bfloat16.

        Raises ``CheckpointError`` when its bytes are missing.
        """
        ...

    @property
    def unneeded(self) -> Set[str]:
        """Tensors that a model need not use, since their values change nothing."""
        ...

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the quantised matrices that ``read_quantised`` knows."""
        ...

    def read_quantised(self, name: str) -> Quantised:  # [O, I], numpy
        """A quantised matrix as it is stored, without loss."""
        ...


def read_bytes(path: Path, offset: int, count: int) -> np.ndarray:  # uint8[count]
    """A byte range of a file. It is not mapped, as mapped pages count as memory of the process."""
    try:
        data = np.fromfile(path, np.uint8, count, offset=offset)
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); check the file") from error
    if len(data) != count:
        raise CheckpointError(
            f"{path} is truncated: {count} bytes expected at byte {offset}, {len(data)} found; "
            "download it again"
        )
    return data
