"""Quantises matrices while a checkpoint of floats is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxinfer.core.errors import CheckpointError, ConfigError
from jaxinfer.models.base import Model
from jaxinfer.weights.checkpoint import Checkpoint, TensorInfo
from jaxinfer.weights.plan import canonical_name
from jaxinfer.weights.quantised.config_keys import check_pattern
from jaxinfer.weights.quantised.quantise import SCHEMES, form_for, quantise_as
from jaxinfer.weights.quantised.scheme import PATTERN, match_rank
from jaxinfer.weights.quantised.values import dequantised
from pallas_kernels.lib.quantised import Form, Quantised

_HEAD = "lm_head"


def linear_names(
    model: Model, checkpoint: Checkpoint, ignore: Sequence[str] = ()
) -> tuple[str, ...]:
    """The checkpoint's weights [outputs, inputs] of linear layers, without the head.

    ``ignore`` holds names of layers and patterns ("re:..."), as compressed-tensors does, of layers
    to leave out. Raises ``ConfigError`` with one that is no pattern or matches no matrix.
    """
    _check_ignored(checkpoint, ignore)
    specs = [spec for spec in model.param_specs if spec.is_linear and spec.path != _HEAD]
    needed = {source.name for spec in specs for source in spec.sources}
    family = model.family
    found = (name for name in checkpoint.tensors if canonical_name(family, name) in needed)
    return tuple(name for name in found if not is_ignored(name.removesuffix(".weight"), ignore))


def _check_ignored(checkpoint: Checkpoint, ignore: Sequence[str]) -> None:
    """Matrices that are not quantised in any case may be named: recipes list the head."""
    modules = {_HEAD}  # also if it is tied, and has no tensor
    modules |= {
        n.removesuffix(".weight") for n, i in checkpoint.tensors.items() if len(i.shape) > 1
    }
    for target in ignore:
        if target.startswith(PATTERN):
            check_pattern(target.removeprefix(PATTERN), "ignore")
        if not any(is_ignored(module, [target]) for module in modules):
            raise ConfigError(
                f"ignore has {target!r}, which matches no matrix of the model; correct it or leave "
                "it out"
            )


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """True if a name or pattern to ``ignore`` matches the layer ``module``."""
    return any(match_rank(module, target) is not None for target in ignore)


class Quantising:
    """A ``Checkpoint``, of which the matrices ``forms`` are quantised to their forms when read.

    ``transposed`` are those that are stored [K, O], or stacks [E, K, O]. Each reading uses
    ``threads`` threads (None: one for each CPU core). ``remedy`` ends the error for a matrix that
    cannot be quantised.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        forms: Mapping[str, Form],
        *,
        transposed: Collection[str] = (),
        threads: int | None = 1,
        remedy: str = "download it again",
    ) -> None:
        self.unneeded = checkpoint.unneeded
        self._checkpoint = checkpoint
        self._forms = forms
        self._transposed = transposed
        self._threads = threads
        self._remedy = remedy

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See ``Checkpoint``; these are the stored tensors."""
        return self._checkpoint.tensors

    @property
    def forms(self) -> Mapping[str, Form]:
        """See ``Checkpoint``."""
        return self._forms

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """See ``Checkpoint``; a quantised matrix is dequantised to float32."""
        if name not in self._forms:
            return self._checkpoint.read(name, part)
        values = dequantised(self.read_quantised(name, part))
        return values.T if name in self._transposed else values

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        """See ``Checkpoint``; raises ``CheckpointError`` if values are not finite."""
        matrix = self._checkpoint.read(name, part)
        matrix = matrix.T if name in self._transposed else matrix
        try:
            return quantise_as(matrix, self._forms[name], self._threads)
        except ValueError as error:
            raise CheckpointError(
                f"tensor {name} cannot be quantised: {error}; {self._remedy}"
            ) from error


class QuantisedOnLoad(Quantising):
    """A ``Checkpoint`` of floats, of which the matrices ``names`` [O, K] are quantised when read,
    and with ``stacks`` also those of stacks [E, O, K].

    Matrices whose size does not allow it stay as they are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: str,
        names: Collection[str],
        threads: int | None = 1,
        *,
        stacks: bool = False,
    ) -> None:
        """Raises ``ConfigError`` for an unknown scheme, or if no matrix can be quantised."""
        if scheme not in SCHEMES:
            raise ConfigError(f"quantization is {scheme!r}; it must be one of {', '.join(SCHEMES)}")
        shapes = {name: checkpoint.tensors[name].shape for name in names}
        if stacks:
            shapes = {name: shape[-2:] for name, shape in shapes.items()}
        made = {name: form_for(scheme, shape) for name, shape in shapes.items()}
        forms = {name: form for name, form in made.items() if form is not None}
        if not forms:
            raise ConfigError(
                f"quantization is {scheme!r}, but the model has no linear layer that can be "
                "quantised; use it without quantization"
            )
        super().__init__(checkpoint, forms, threads=threads)


def quantised_like(model: Model, checkpoint: Checkpoint) -> Quantising:
    """The checkpoint of floats, whose matrices are quantised as the model keeps them.

    Each is read by one thread and quantised by all.
    """
    forms = dict(model.forms)
    canonical = {name: canonical_name(model.family, name) for name in checkpoint.tensors}
    transposed = {
        source.name
        for spec in model.declared_specs
        if spec.matrix in ("in_out", "experts_in_out")
        for source in spec.sources
    }
    return Quantising(
        checkpoint,
        {name: forms[own] for name, own in canonical.items() if own in forms},
        transposed={name for name, own in canonical.items() if own in transposed},
        threads=None,
        remedy="the old weights stay; correct the new ones",
    )
