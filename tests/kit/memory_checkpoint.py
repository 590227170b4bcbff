"""A checkpoint in memory that counts readings and the bytes of its arrays that are alive."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.text.tokenizer_config import TokenizerSpec
from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from jaxinfer.weights.sources import ModelSource
from pallas_kernels.lib.quantised import Form, Quantised

# The names that safetensors has for dtypes.
_DTYPES = {"uint8": "U8", "float32": "F32", "bfloat16": "BF16", "int32": "I32", "int64": "I64"}
_DTYPES |= {"float8_e4m3fn": "F8_E4M3", "float16": "F16"}


class Held:
    """Bytes of watched arrays that are alive, and the most of them at any time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an array may go while it is held
        self.now = self.peak = 0

    def watch(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        with self._lock:
            self.now += array.nbytes
            self.peak = max(self.peak, self.now)
        weakref.finalize(array, self._gone, array.nbytes)
        return array

    def _gone(self, nbytes: int) -> None:
        with self._lock:
            self.now -= nbytes


class InMemory:
    """A ``Checkpoint`` of arrays; ``reads`` counts the readings of each."""

    def __init__(self, arrays: Mapping[str, np.ndarray], held: Held | None = None) -> None:
        self._arrays = arrays
        self._held = held or Held()
        self.reads: Counter[str] = Counter()
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(array.shape, "F32", array.nbytes, True)
            for name, array in arrays.items()
        }

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """A copy, as a file gives one."""
        self.reads[name if part is None else f"{name}[{part}]"] += 1
        array = self._arrays[name]
        return self._held.watch((array if part is None else array[part]).copy())

    forms: Mapping[str, Form] = {}
    unneeded: frozenset[str] = frozenset()

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        raise KeyError(name)


class Typed(InMemory):
    """Arrays in memory under the dtypes that safetensors have."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self.tensors = {
            name: TensorInfo(a.shape, kind, a.nbytes, kind in ("F32", "F16", "BF16"))
            for name, a in arrays.items()
            for kind in [_DTYPES[str(a.dtype)]]
        }


def source_of(checkpoint: Checkpoint, *, quantised: bool = False) -> ModelSource:
    """The checkpoint as a source; ``quantised`` has what is made of it cached."""

    def no_tokenizer() -> TokenizerSpec:
        raise AssertionError("weights have no tokenizer")

    configs: Mapping[str, Any] = {}
    return ModelSource("", "", configs, configs, checkpoint, "one", quantised, no_tokenizer)
