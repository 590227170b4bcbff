"""Matches a model's parameters with a checkpoint's tensors before any data is read.

Owns: the checks of names, shapes, dtypes and completeness.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.core.errors import CheckpointError
from jaxinfer.models.base import Model, ModelFamily
from jaxinfer.models.hf_keys import WITHOUT_HEAD
from jaxinfer.models.params import ParamSpec, by_path
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from pallas_kernels.lib.quantised import Form

_MAX_NAMED = 3  # tensors in one message
_HEAD = "lm_head.weight"
_INTEGERS = ("I32", "I64")  # the dtypes in which a parameter of integers is stored
_BARE = re.compile(r"(embed_tokens|layers|norm)\.")


@dataclass(frozen=True)
class PlannedParam:
    """One parameter with the checkpoint's names and total size of its source tensors."""

    spec: ParamSpec
    arrays: dict[str, ArraySpec]  # by path; each has a dtype
    names: tuple[str, ...]  # of the source tensors
    nbytes: int  # of the source tensors, as stored

    def parts(
        self, checkpoint: Checkpoint, index: int = 0, kept: Sequence[int] | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Read the sources of one piece, or of a parameter without pieces, and build the part of
        each device that has one (``ParamSpec.ranks_of``): its arrays by path, contiguous.

        ``kept``: only the parts of these devices (None: all); if they have none, nothing is read.
        """
        ranks: Sequence[int] = self.spec.ranks_of(index)
        if kept is not None and not (ranks := [rank for rank in ranks if rank in kept]):
            return
        count = self.spec.sources_per_piece
        own = slice(index * count, (index + 1) * count)
        tensors = [
            checkpoint.read(name, source.part)
            if source.form is None
            else checkpoint.read_quantised(name, source.part)
            for name, source in zip(self.names[own], self.spec.sources[own], strict=True)
        ]
        if len(ranks) > 1 and self.spec.is_replicated:
            yield from [self._built(tensors, index, 0)] * len(ranks)
            return
        for rank in ranks:
            made = self._built(tensors, index, rank)
            if rank == ranks[-1]:
                del tensors  # their memory is free while the last part is placed
            yield made

    def _built(self, tensors: list[Any], index: int, rank: int) -> dict[str, np.ndarray]:
        built = by_path({self.spec.path: self.spec.built(tensors, index, rank)})
        return {
            path: np.asarray(built[path], array.dtype, order="C")
            for path, array in self.arrays.items()
        }

    def whole(self, checkpoint: Checkpoint) -> dict[str, np.ndarray]:
        """The whole parameter in host memory, of a model that is not divided; see ``parts``."""
        assert self.spec.devices == 1, f"{self.spec.path} is divided"
        if self.spec.pieces is None:
            return next(self.parts(checkpoint))
        made = {path: np.empty(array.shape, array.dtype) for path, array in self.arrays.items()}
        for index in range(self.spec.pieces):
            for path, piece in next(self.parts(checkpoint, index)).items():
                made[path][index] = piece
        return made


def forms_of(family: ModelFamily, checkpoint: Checkpoint) -> tuple[tuple[str, Form], ...]:
    """The forms of a checkpoint's quantised matrices, with their names in the family's specs."""
    return tuple((canonical_name(family, name), form) for name, form in checkpoint.forms.items())


def plan_params(model: Model, checkpoint: Checkpoint) -> tuple[PlannedParam, ...]:
    """The source tensors of each parameter, in the order of the specs.

    Raises ``CheckpointError`` if a tensor is missing, has another shape, is stored in a dtype that
    cannot be read, or belongs to no parameter, and for a head that is not the embedding with which
    config.json ties it, of which some rows are read.
    """
    family = model.family
    own_names = {canonical_name(family, name): name for name in checkpoint.tensors}
    # By the declared specs: an absent tensor has no form, which would be taken for one of floats.
    sources = (source for spec in model.declared_specs for source in spec.sources)
    # once each: the parts of a stack are sources of their own
    needed = dict.fromkeys(canonical_name(family, source.name) for source in sources)
    own_names = _with_other_names(family, own_names, needed)
    if missing := [name for name in needed if name not in own_names]:
        raise CheckpointError(
            f"the checkpoint has no {_listed(missing)}, which {model.architecture} needs; "
            "check that config.json belongs to these weights"
        )
    _refuse_other_head(model, checkpoint, own_names)
    consumed = {own_names[name] for name in needed}
    consumed |= checkpoint.unneeded
    if unused := [name for name in checkpoint.tensors if name not in consumed]:
        _refuse_unexpected(model, checkpoint, unused)
    return tuple(_plan_param(spec, own_names, model, checkpoint) for spec in model.param_specs)


def _refuse_other_head(model: Model, checkpoint: Checkpoint, own_names: Mapping[str, str]) -> None:
    head, specs = own_names.get(_HEAD), {spec.path: spec for spec in model.declared_specs}
    if head is None or not model.config.tie_word_embeddings or "embed" not in specs:
        return
    if model.hf_config.get(WITHOUT_HEAD):
        return
    embed = own_names[canonical_name(model.family, specs["embed"].sources[0].name)]
    one, other = (checkpoint.tensors[name] for name in (head, embed))
    if not (one.readable and other.readable):  # quantised: its values have been rounded
        return
    last = min(one.shape[0], other.shape[0]) - 1
    own, tied = ([checkpoint.read(name, i) for i in (0, last // 2, last)] for name in (head, embed))
    if one.shape == other.shape and np.array_equal(own, tied):
        return
    raise CheckpointError(
        f"tensor {head}{_place(one)} differs from {embed}, with which config key "
        "'tie_word_embeddings' ties it; set that to false to use it, or remove the tensor"
    )


def _plan_param(
    spec: ParamSpec, own_names: dict[str, str], model: Model, checkpoint: Checkpoint
) -> PlannedParam:
    names = tuple(own_names[canonical_name(model.family, source.name)] for source in spec.sources)
    infos = [checkpoint.tensors[name] for name in names]
    arrays = {path: model.arrays[path] for path in spec.leaves}
    integers = all(array.dtype == jnp.int32 for array in arrays.values())
    divided = spec.any_rows and _same_rows(infos, spec.sources)
    for name, info, source in zip(names, infos, spec.sources, strict=True):
        if info.shape != source.shape and not divided:
            raise CheckpointError(
                f"tensor {name}{_place(info)} has shape {info.shape} instead of {source.shape}; "
                "check that config.json belongs to these weights"
            )
        if source.form is None and not (info.dtype in _INTEGERS if integers else info.readable):
            wanted = " or ".join(_INTEGERS) if integers else "F32, F16 or BF16"
            raise CheckpointError(
                f"tensor {name}{_place(info)} is stored as {info.dtype}, which cannot be read; "
                f"convert the model to {wanted}"
            )
    distinct = dict(zip(names, infos, strict=True))  # the parts of a stack are of one tensor
    return PlannedParam(spec, arrays, names, sum(info.nbytes for info in distinct.values()))


def _with_other_names(
    family: ModelFamily, own_names: Mapping[str, str], needed: Collection[str]
) -> dict[str, str]:
    """The tensors' names by the specs' ones, where some have another (``ModelFamily``)."""
    found = dict(own_names)
    for name, own in own_names.items() if family.other_names else ():
        for pattern, meant in family.other_names:
            other = re.sub(pattern, meant, name)
            if name not in needed and other in needed and other not in own_names:
                found[other] = own
    return found


def _same_rows(infos: Sequence[TensorInfo], sources: Sequence[Source]) -> bool:
    """True if the tensors together have the sources' rows."""
    stored, needed = [one.shape for one in infos], [one.shape for one in sources]
    if {shape[1:] for shape in stored} != {shape[1:] for shape in needed}:
        return False
    return sum(shape[0] for shape in stored) == sum(shape[0] for shape in needed)


def _refuse_unexpected(model: Model, checkpoint: Checkpoint, names: list[str]) -> None:
    patterns = [re.compile(pattern) for pattern in model.family.ignored_tensors]
    unexpected = [
        name
        for name in names
        # a network of no columns, as of no experts that all tokens use, computes nothing
        if 0 not in checkpoint.tensors[name].shape
        and not any(p.fullmatch(canonical_name(model.family, name)) for p in patterns)
    ]
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds {_listed(unexpected)}{_place(checkpoint.tensors[unexpected[0]])}"
            f", which {model.architecture} does not use; "
            "check that config.json belongs to these weights"
        )


def _place(info: TensorInfo) -> str:
    return f" of {info.file}" if info.file else ""


def canonical_name(family: ModelFamily, name: str) -> str:
    """The name without the prefix that some checkpoints of the family add, and with the one that a
    decoder saved without its head lacks (``Qwen3Model``: layers.0... for model.layers.0...).
    """
    prefixes = family.optional_prefix
    prefixes = (prefixes,) if isinstance(prefixes, str) else prefixes
    prefix = next((one for one in prefixes if name.startswith(one)), "")
    bare = name.removeprefix(prefix)
    is_bare = _BARE.match(bare) or (bare != name and prefix.startswith("model."))
    return f"model.{bare}" if is_bare else bare


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor {', '.join(names[:_MAX_NAMED])}{more}"
