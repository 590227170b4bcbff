"""Matches a model's tensor rules with a checkpoint, before any data is read.

Owns: names, shapes, dtypes and completeness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.base import Model, ModelFamily, TensorRule
from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo

_MAX_NAMED = 3  # tensors that one message names


@dataclass(frozen=True)
class PlannedParam:
    """One parameter, the checkpoint's own names of its sources, and how much is read for it."""

    rule: TensorRule
    dtype: np.dtype
    names: tuple[str, ...]
    nbytes: int  # of the sources

    def build(self, checkpoint: Checkpoint) -> np.ndarray:
        """Read the sources and make the parameter, contiguous."""
        tensors = [checkpoint.read(name) for name in self.names]
        return np.ascontiguousarray(self.rule.build(*tensors), self.dtype)


def plan_params(model: Model, checkpoint: Checkpoint) -> tuple[PlannedParam, ...]:
    """What is read for each parameter, in the order of the rules.

    Raises ``CheckpointError`` when a tensor is missing, has another shape, is stored in a dtype
    that cannot be read, or belongs to no rule.
    """
    family = model.family
    own_names = {_canonical(family, name): name for name in checkpoint.tensors}
    rules = model.tensor_rules
    wanted = [(_canonical(family, s), rule) for rule in rules for s in rule.sources]
    if missing := [source for source, _ in wanted if source not in own_names]:
        raise CheckpointError(
            f"the checkpoint has no {_listed(missing)}, which {model.architecture} needs; "
            "check that config.json belongs to these weights"
        )
    consumed = {own_names[source] for source, _ in wanted}
    if left := [name for name in checkpoint.tensors if name not in consumed]:
        _refuse_unexpected(model, checkpoint, left)
    return tuple(_plan_param(rule, own_names, model, checkpoint) for rule in rules)


def _plan_param(
    rule: TensorRule, own_names: dict[str, str], model: Model, checkpoint: Checkpoint
) -> PlannedParam:
    names = tuple(own_names[_canonical(model.family, source)] for source in rule.sources)
    infos = [checkpoint.tensors[name] for name in names]
    for name, info, shape in zip(names, infos, rule.shapes, strict=True):
        if info.shape != shape:
            raise CheckpointError(
                f"tensor {name}{_place(info)} has shape {info.shape} instead of {shape}; "
                "check that config.json belongs to these weights"
            )
        if not info.readable:
            raise CheckpointError(
                f"tensor {name}{_place(info)} is stored as {info.dtype}, which cannot be read; "
                "convert the model to F32, F16 or BF16"
            )
    dtype = np.dtype(rule.dtype or model.config.dtype)
    return PlannedParam(rule, dtype, names, sum(info.nbytes for info in infos))


def _refuse_unexpected(model: Model, checkpoint: Checkpoint, names: list[str]) -> None:
    patterns = [re.compile(pattern) for pattern in model.family.ignored_tensors]
    unexpected = [
        name
        for name in names
        if not any(p.fullmatch(_canonical(model.family, name)) for p in patterns)
    ]
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds {_listed(unexpected)}{_place(checkpoint.tensors[unexpected[0]])}"
            f", which {model.architecture} does not use; "
            "check that config.json belongs to these weights"
        )


def _place(info: TensorInfo) -> str:
    return f" of {info.file}" if info.file else ""


def _canonical(family: ModelFamily, name: str) -> str:
    """The name without the prefix that some checkpoints of the family add."""
    return name.removeprefix(family.optional_prefix)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor {', '.join(names[:_MAX_NAMED])}{more}"
