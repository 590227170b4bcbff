"""Experts that are stacked in one tensor, presented as tensors of single experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from pallas_kernels.lib.quantised import Form, Quantised

_STACK = re.compile(r"(?P<layer>.*\.mlp\.experts)\.(?P<name>gate_up_proj|down_proj)")


class _Place(NamedTuple):
    """Where an expert's matrix is: rows of a part of a stack."""

    stack: str
    part: int
    rows: slice


class UnstackedExperts:
    """A ``Checkpoint`` with tensors of its own for each expert, as older files have them.

    A stack is gate_up_proj [E, 2F, D], gates first, or down_proj [E, D, F]. Other tensors are
    presented as they are.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        self._last: tuple[tuple[str, int], np.ndarray] | None = None
        for name, info in checkpoint.tensors.items():
            match = _STACK.fullmatch(name)
            if match is None or len(info.shape) != 3:
                self._tensors[name] = info
                continue
            experts, outputs, inputs = info.shape
            pair = match["name"] == "gate_up_proj"
            names = ("gate_proj", "up_proj") if pair else ("down_proj",)
            count = outputs // len(names)
            own = replace(info, shape=(count, inputs), nbytes=info.nbytes // (experts * len(names)))
            for part in range(experts):
                for number, kind in enumerate(names):
                    single = f"{match['layer']}.{part}.{kind}.weight"
                    rows = slice(number * count, (number + 1) * count)
                    self._tensors[single] = own
                    self._places[single] = _Place(name, part, rows)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See ``Checkpoint``."""
        return self._tensors

    @property
    def unneeded(self) -> Set[str]:
        """See ``Checkpoint``."""
        return self._checkpoint.unneeded

    @property
    def forms(self) -> Mapping[str, Form]:
        """See ``Checkpoint``; stacks are of floats."""
        return self._checkpoint.forms

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``. A gate and its up, which are read in turn, are read once."""
        place = self._places.get(name)
        if place is None:
            return self._checkpoint.read(name, part)
        key, last = (place.stack, place.part), self._last
        if last is None or last[0] != key:
            last = self._last = key, self._checkpoint.read(*key)
        return last[1][place.rows]

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``."""
        return self._checkpoint.read_quantised(name, part)
