"""Typed access to the metadata of one architecture, with a record of the keys that were read.

Owns: checking types and ranges; every error names the file and the key.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.hf_config import MAX_LAYERS, MAX_NUMBER, MAX_SIZE
from jaxinfer.weights.gguf.header import GGUFHeader


class ArchitectureMetadata:
    """Reads keys without the architecture's prefix: "block_count" stands for llama.block_count."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header = header
        self.architecture = architecture
        self._prefix = architecture + "."
        self._read: set[str] = set()

    def text(self, key: str, default: str) -> str:
        """A string."""
        return self._value(key, default, str, "a string")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer, also if it is stored as a list with the same value for each layer.

        Raises ``CheckpointError`` if the key is absent and has no default.
        """
        value = self._value(key, default, (int, list), "a positive integer")
        if isinstance(value, list):
            if not value or value.count(value[0]) != len(value):
                remedy = "use a model of which that is true"
                self.refuse(key, value, "must be the same in every layer", remedy)
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.refuse(key, value, "must be a positive integer")
        most = MAX_LAYERS if key == "block_count" else MAX_SIZE
        if value > most:  # before a list of that size is made
            self.refuse(key, value, f"must be at most {most}", "use another file")
        return value

    def count_if_set(self, key: str, default: int) -> int:
        """A positive integer, or ``default`` if the key is absent or 0, which is "not set"."""
        return default if self._stored(key) in (None, 0) else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float32 as its shortest decimal: 1e-05 instead of 9.999999747378752e-06.

        Raises ``CheckpointError`` if the key is absent and has no default.
        """
        value = self._value(key, default, (int, float), "a positive number")
        if not 0 < value <= MAX_NUMBER:
            self.refuse(key, value, "must be a positive number")
        return float(str(np.float32(value)))

    def number_if_set(self, key: str) -> float | None:
        """A positive number, or None if the key is absent or 0, which stands for "not set"."""
        return None if self._stored(key) in (None, 0) else self.number(key)

    def flag(self, key: str) -> bool:
        """A truth value; False if the key is absent."""
        value = self._stored(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, value, "must be true or false")
        return bool(value)

    def flags(self, key: str) -> list[bool] | None:
        """A list of truth values; None if the key is absent."""
        stored = self._stored(key)
        known = isinstance(stored, list) and all(isinstance(one, bool) for one in stored)
        if stored is not None and not known:
            self.refuse(key, stored, "must be a list of true or false")
        return stored

    def pattern(self, key: str) -> int | list[bool] | None:
        """A period from 0 or a list of truth values; None if the key is absent."""
        stored = self._stored(key)
        if stored is None or (type(stored) is int and stored >= 0):
            return stored
        if isinstance(stored, list) and all(one in (0, 1) for one in stored):
            return [bool(one) for one in stored]
        self.refuse(key, stored, "must be an integer from 0, or a list of true or false")

    def listed(self, key: str) -> list[int]:
        """A list of integers from 0."""
        stored: list[int] = self._value(key, None, list, "a list")
        if not all(type(one) is int and one >= 0 for one in stored):
            self.refuse(key, stored, "must be a list of integers from 0")
        return stored

    def numbers(self, key: str) -> list[float]:
        """A list of numbers, which may be infinite."""
        stored: list[float] = self._value(key, None, list, "a list")
        if not all(type(one) is float and not math.isnan(one) for one in stored):
            self.refuse(key, stored, "must be a list of numbers")
        return stored

    def each(self, key: str) -> list[int]:
        """Positive integers, one for each block, also if one is stored for all."""
        stored = self._stored(key)
        if isinstance(stored, list):
            numbers, blocks = self.counts(key), self.count("block_count")
            if not all(numbers):
                self.refuse(key, stored, f"must be a list of {blocks} positive integers")
            return numbers
        return [self.count(key)] * self.count("block_count")

    def counts(self, key: str) -> list[int]:
        """A list of integers from 0, one for each block."""
        stored, blocks = self._value(key, None, list, "a list"), self.count("block_count")
        if len(stored) != blocks or not all(type(one) is int and one >= 0 for one in stored):
            self.refuse(key, stored, f"must be a list of {blocks} integers from 0")
        return stored

    def only(self, key: str, *values: Any) -> None:
        """Refuse a value other than ``values``; the key may be absent."""
        stored = self._stored(key)
        if stored is None or any(_equal(stored, value) for value in values):
            return
        known = " or ".join(dict.fromkeys(str(value) for value in values))
        self.refuse(key, stored, f"is supported only as {known}", "use another model")

    def has(self, key: str) -> bool:
        """True if the file has the key."""
        return self._prefix + key in self.header.metadata

    def is_read(self, key: str) -> bool:
        """True if another call has named the key."""
        return key in self._read

    def skip(self, key: str) -> None:
        """Count a key as read, whatever its value."""
        self._read.add(key)

    def unread(self) -> list[str]:
        """The architecture's keys that no other call has named, in full."""
        own = (key for key in self.header.metadata if key.startswith(self._prefix))
        return [key for key in own if key.removeprefix(self._prefix) not in self._read]

    def refuse(
        self, key: str, value: object, words: str, remedy: str = "convert the model again"
    ) -> NoReturn:
        """Raise ``CheckpointError``: the key ``words`` ("must be ..."), got ``value``."""
        raise CheckpointError(
            f"{self.header.path}: metadata key {self._prefix + key} {words}, "
            f"got {short(value)}; {remedy}"
        )

    def has_tensor(self, name: str) -> bool:
        """True if the file holds a tensor of that name."""
        return name in self.header.tensors

    def has_in_a_layer(self, name: str) -> bool:
        """True if a block of the file has a tensor of that name."""
        return any(
            one.startswith("blk.") and one.split(".", 2)[2] == name for one in self.header.tensors
        )

    def _empty_blocks(self) -> set[str]:
        """The blocks that have neither heads nor a network, of a file that lists both."""
        keys = ("attention.head_count", "feed_forward_length")
        heads, widths = (self.header.metadata.get(self._prefix + key) for key in keys)
        if not isinstance(heads, list) or not isinstance(widths, list):
            return set()
        pairs = zip(heads, widths, strict=False)
        return {str(i) for i, (one, width) in enumerate(pairs) if one == width == 0}

    @property
    def num_layers(self) -> int:
        """``block_count`` without the prediction layers, which are the last blocks.

        Raises ``CheckpointError`` if tensors of some blocks are missing; a file may lack those of
        prediction layers.
        """
        count, predictions = self.count("block_count"), self.prediction_layers
        if predictions >= count:
            words = f"must be below block_count, which is {count}"
            self.refuse("nextn_predict_layers", predictions, words)
        names = (name.split(".") for name in self.header.tensors if name.startswith("blk."))
        present = {parts[1] for parts in names}
        needed, further = (
            {str(i) for i in blocks}
            for blocks in (range(count - predictions), range(count - predictions, count))
        )
        if present - further != needed - (self._empty_blocks() - present):
            raise CheckpointError(
                f"{self.header.path} says it has {count} blocks but holds tensors of "
                f"{len(present)}; download it again"
            )
        return len(needed)

    @property
    def prediction_layers(self) -> int:
        """The number of blocks for multi-token prediction, which ``block_count`` includes."""
        return self.count_if_set("nextn_predict_layers", 0)

    def _stored(self, key: str) -> Any:
        self._read.add(key)
        return self.header.metadata.get(self._prefix + key)

    def _value(self, key: str, default: Any, kind: type | tuple[type, ...], words: str) -> Any:
        stored = self._stored(key)
        value = default if stored is None else stored
        if value is None:
            raise CheckpointError(
                f"{self.header.path} lacks the metadata key {self._prefix + key}; "
                "convert the model again"
            )
        if not isinstance(value, kind) or isinstance(value, bool):
            self.refuse(key, value, f"must be {words}")
        return value


def _equal(stored: Any, value: Any) -> bool:
    if isinstance(stored, bool) or isinstance(value, bool):
        return stored is value
    if isinstance(stored, (int, float)) and isinstance(value, (int, float)):
        return math.isclose(stored, value, rel_tol=1e-6)  # stored as float32
    return stored == value
