"""The ``Checkpoint`` protocol: named tensors with known shapes that are read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxinfer.core.errors import CheckpointError
from pallas_kernels.lib.quantised import Form, Quantised


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

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """One tensor in ``TensorInfo.shape``, as float32, float16 or bfloat16.

        With ``part`` only this part of it along the first dimension, without that dimension.
        Raises ``CheckpointError`` when its bytes are missing.
        """
        ...

    @property
    def unneeded(self) -> Set[str]:
        """Tensors that a model need not use, since their values change nothing."""
        ...

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the quantised matrices, or stacks of them, that ``read_quantised`` knows."""
        ...

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:  # [O, I], numpy
        """A quantised matrix as it is stored, without loss; of a stack of them matrix ``part``."""
        ...


def read_bytes(path: Path, offset: int, count: int) -> np.ndarray:  # uint8[count]
    """A byte range of a file. It is not mapped, as mapped pages count as memory of the process."""
    return next(read_chunks(path, offset, count, max(count, 1)), np.empty(0, np.uint8))


def read_chunks(path: Path, offset: int, count: int, size: int) -> Iterator[np.ndarray]:  # uint8
    """A byte range of a file in chunks of ``size``, in one buffer: a chunk overwrites the last one.

    Memory of its own for each chunk would take three times as long, for its page faults.
    """
    buffer = np.empty(min(size, count), np.uint8)
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            for start in range(0, count, size):
                chunk = buffer[: min(size, count - start)]
                _fill(file, chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(f"cannot read {path} ({error.strerror}); check the file") from error


def _fill(file: FileIO, chunk: np.ndarray) -> None:
    """Read as many bytes; a single call may return fewer (Linux: 2 GB at most)."""
    view, found = memoryview(chunk), 0
    while found < len(view):
        read = file.readinto(view[found:])
        if not read:
            raise CheckpointError(
                f"{file.name} is truncated: {len(view)} bytes expected at byte "
                f"{file.tell() - found}, {found} found; download it again"
            )
        found += read
