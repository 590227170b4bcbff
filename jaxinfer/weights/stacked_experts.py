"""Stacks of a layer's experts, presented as tensors of single experts, and the reverse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from pallas_kernels.lib.quantised import Form, Quantised

_STACK = re.compile(r"(?P<layer>.*\.experts)\.(?P<name>gate_up_proj|down_proj)")
_SINGLE = re.compile(
    r"(?P<layer>.*\.experts)\.(?P<part>\d+)\.(?P<name>gate_proj|up_proj|down_proj)\.weight"
)


class _Place(NamedTuple):
    """Where an expert's matrix is: rows of a part of a stack, or, ``turned``, its columns."""

    stack: str
    part: int
    rows: slice
    turned: bool = False


class _OtherTensors:
    """A ``Checkpoint`` whose tensors of floats are other ones than those of ``checkpoint``."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tensors: dict[str, TensorInfo] = {}

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
        """See ``Checkpoint``."""
        return self._checkpoint.forms

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``."""
        return self._checkpoint.read_quantised(name, part)


class UnstackedExperts(_OtherTensors):
    """A ``Checkpoint`` with tensors of its own for each expert, as older files have them.

    A stack is gate_up_proj [E, 2F, D], gates first, or down_proj [E, D, F], and is of floats; some
    files have [E, D, 2F] and [E, F, D] (Qwen3-VL). Other tensors are presented as they are.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._places: dict[str, _Place] = {}
        self._last: tuple[tuple[str, int], np.ndarray] | None = None
        for name, info in checkpoint.tensors.items():
            match = _STACK.fullmatch(name)
            if match is None or len(info.shape) != 3 or name in checkpoint.forms:
                self._tensors[name] = info
                continue
            experts, outputs, inputs = info.shape
            turned = _is_turned(checkpoint, match["layer"])
            if turned:
                outputs, inputs = inputs, outputs
            pair = match["name"] == "gate_up_proj"
            names = ("gate_proj", "up_proj") if pair else ("down_proj",)
            count = outputs // len(names)
            own = replace(info, shape=(count, inputs), nbytes=info.nbytes // (experts * len(names)))
            for part in range(experts):
                for number, kind in enumerate(names):
                    single = f"{match['layer']}.{part}.{kind}.weight"
                    rows = slice(number * count, (number + 1) * count)
                    self._tensors[single] = own
                    self._places[single] = _Place(name, part, rows, turned)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``. A gate and its up, which are read in turn, are read once."""
        place = self._places.get(name)
        if place is None:
            return self._checkpoint.read(name, part)
        key, last = (place.stack, place.part), self._last
        if last is None or last[0] != key:
            last = self._last = key, self._checkpoint.read(*key)
        return (last[1].T if place.turned else last[1])[place.rows]


def _is_turned(checkpoint: Checkpoint, layer: str) -> bool:
    """True if the stacks of a layer have inputs before outputs, as their shapes show together."""
    stacks = [checkpoint.tensors.get(f"{layer}.{name}") for name in ("gate_up_proj", "down_proj")]
    shapes = [stack.shape for stack in stacks if stack is not None and len(stack.shape) == 3]
    if len(shapes) < 2:
        return False
    (_, rows, columns), (_, inputs, outputs) = shapes
    return (columns, rows) == (2 * inputs, outputs)


class StackedExperts(_OtherTensors):
    """A ``Checkpoint`` of floats whose single experts are stacked as in ``UnstackedExperts``.

    Experts are read in order, each once, and host memory holds one stack. Other tensors are
    presented as they are.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._members: dict[str, list[list[str]]] = {}  # by expert the names, gates first
        for name, info in checkpoint.tensors.items():
            match = _SINGLE.fullmatch(name)
            if match is None:
                self._tensors[name] = info
                continue
            kind = "down_proj" if match["name"] == "down_proj" else "gate_up_proj"
            stack, part = f"{match['layer']}.{kind}", int(match["part"])
            members = self._members.setdefault(stack, [])
            if part == len(members):
                members.append([])
            members[part].append(name)
            rows, inputs = info.shape
            sizes = (len(members), len(members[0]) * rows, inputs)
            nbytes = info.nbytes * sizes[0] * len(members[0])
            self._tensors[stack] = replace(info, shape=sizes, nbytes=nbytes)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``."""
        members = self._members.get(name)
        if members is None:
            return self._checkpoint.read(name, part)
        if part is not None:
            return np.concatenate([self._checkpoint.read(one) for one in members[part]])
        return np.stack([self.read(name, expert) for expert in range(len(members))])
