"""What a checkpoint is to the loader: named tensors with known shapes, read one at a time.

Owns: the ``Checkpoint`` protocol, ``TensorInfo`` and reading a byte range of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxinfer.core.errors import CheckpointError


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor; ``shape`` is the one Hugging Face stores."""

    shape: tuple[int, ...]
    dtype: str  # the format's own name, such as BF16 or Q4_1
    nbytes: int  # as stored
    readable: bool  # whether ``Checkpoint.read`` knows the dtype
    file: str = ""  # the file's name, where the checkpoint may have several


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names. Nothing but headers is read before ``read``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in ``TensorInfo.shape``, as float32, float16 or bfloat16.

        Raises ``CheckpointError`` when its bytes are missing.
        """
        ...


def read_bytes(path: Path, offset: int, count: int) -> np.ndarray:  # uint8[count]
    """A byte range of a file, by plain reads: mapped pages would count as the process's memory."""
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
