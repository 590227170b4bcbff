"""Checks that a family reads each tensor of a published index once, and misses none in silence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.registry import build_model, may_stack_experts, text_config
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.plan import canonical_name, plan_params
from jaxinfer.weights.stacked_experts import UnstackedExperts
from kit.memory_checkpoint import Typed


def check_read_once(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], count: int, unused: str
) -> None:
    """Load a model from zeros of these names and shapes, of which ``count`` make parameters.

    ``unused`` is the pattern of names that are not read. Then one tensor of each kind is left out,
    and at last one is added, which must be refused with its name.
    """
    model = build_model(text_config(config), "bfloat16")

    def opened(files: Typed) -> Checkpoint:
        return UnstackedExperts(files) if may_stack_experts(config) else files

    files = zeros(shapes)
    checkpoint = opened(files)
    for planned in plan_params(model, checkpoint):
        planned.whole(checkpoint)
    needed = {name for name in shapes if not re.fullmatch(unused, name)}
    assert len(needed) == count
    parts = {  # each expert of a stack is read by itself
        name: [f"{name}[{i}]" for i in range(shapes[name][0])]
        if len(shapes[name]) == 3 and ".experts." in name
        else [name]
        for name in needed
    }
    assert set(files.reads) == {part for own in parts.values() for part in own}
    assert set(files.reads.values()) == {1}
    kinds = {re.sub(r"\d+", "#", name): name for name in needed}
    for name in kinds.values():
        others = {one: shape for one, shape in shapes.items() if one != name}
        missing = "" if len(parts[name]) > 1 else re.escape(canonical_name(model.family, name))
        with pytest.raises(CheckpointError, match=f"checkpoint has no tensor {missing}.*, which"):
            plan_params(model, opened(zeros(others)))
    name = max(needed)
    with pytest.raises(CheckpointError, match=f"checkpoint holds tensor {re.escape(name)}s"):
        plan_params(model, opened(zeros({**shapes, f"{name}s": shapes[name]})))


def zeros(shapes: Mapping[str, tuple[int, ...]]) -> Typed:
    """A checkpoint of bfloat16 zeros, which take no memory."""
    zero = np.zeros((), ml_dtypes.bfloat16)
    return Typed({name: np.broadcast_to(zero, shape) for name, shape in shapes.items()})
