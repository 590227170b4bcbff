"""Safetensors checkpoints: the tensors of one file, or of several shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.weights.checkpoint import TensorInfo, read_bytes
from jaxinfer.weights.safetensors_header import DTYPES, MAX_TENSORS, read_header
from pallas_kernels.lib.quantised import Form, Quantised


class SafetensorsCheckpoint:
    """The tensors of several safetensors files; opening checks them against the files' sizes."""

    unneeded: frozenset[str] = frozenset()

    def __init__(self, paths: Iterable[Path]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.forms: dict[str, Form] = {}  # a checkpoint of floats
        self._places: dict[str, tuple[Path, int]] = {}  # each tensor's file, and its first byte
        for path in paths:
            for name, (info, offset) in read_header(path).items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"tensor {name} is both in {self._places[name][0]} and in {path}; "
                        "remove the file that does not belong to the checkpoint"
                    )
                self.tensors[name] = replace(info, file=path.name)
                self._places[name] = (path, offset)
            if len(self.tensors) > MAX_TENSORS:
                raise CheckpointError(
                    f"{path.parent} holds more than {MAX_TENSORS} tensors; use another checkpoint"
                )

    def leave_out(self, is_left_out: Callable[[str], bool]) -> bool:
        """Forget the tensors with such names, as if no file had them; True if there are any."""
        names = [name for name in self.tensors if is_left_out(name)]
        for name in names:
            del self.tensors[name]
        return bool(names)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``; a part of a quantised matrix has the dtype that is stored."""
        info, (path, offset) = self.tensors[name], self._places[name]
        shape, nbytes = info.shape, info.nbytes
        if part is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
            offset += part * nbytes
        data = read_bytes(path, offset, nbytes)
        return data.view(DTYPES[info.dtype]).reshape(shape)

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``; no matrix is quantised."""
        raise KeyError(name)
