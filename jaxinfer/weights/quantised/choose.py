"""Which matrices of a model are quantised: by its files, or while it loads (``quantization``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.base import Model
from jaxinfer.models.sources import Source
from jaxinfer.weights.plan import canonical_name, forms_of
from jaxinfer.weights.quantised.on_load import QuantisedOnLoad, linear_names
from jaxinfer.weights.quantised.quantise import SCHEMES, form_for
from jaxinfer.weights.quantised.scheme import Scheme
from jaxinfer.weights.quantised.stored import check_fits, form_of
from jaxinfer.weights.sources import ModelSource
from pallas_kernels.lib.quantised import Form

type Forms = tuple[tuple[str, Form], ...]  # with the names of tensors in the family's specs
# Names that vLLM has for reading a format with other kernels.
_SAME = MappingProxyType({"awq_marlin": "awq", "gptq_marlin": "gptq"})


def quantised_source(
    source: ModelSource, model: Model, quantization: str | None
) -> tuple[ModelSource, Forms]:
    """The source, which quantises if asked, and the forms of its quantised matrices.

    ``quantization`` is one of ``quantise.SCHEMES``, for a model of floats, or the method by which
    the files are quantised already. Raises ``ConfigError`` if it is neither, naming the choices.
    """
    method = source.scheme.method if source.scheme else "gguf" if source.forms else None
    if quantization is not None and method is None:
        return _on_load(source, model, quantization)
    if quantization is not None and _SAME.get(quantization, quantization) != method:
        raise ConfigError(
            f"quantization is {quantization!r}, but {source.reference} is quantised already, by "
            f"{method}; leave it out"
        )
    if source.checkpoint is not None:
        return source, forms_of(model.family, source.checkpoint)
    if source.scheme is None:
        forms = source.forms.items()
        return source, tuple((canonical_name(model.family, name), form) for name, form in forms)
    return source, tuple(_of_scheme(source.scheme, model))


def _on_load(source: ModelSource, model: Model, scheme: str) -> tuple[ModelSource, Forms]:
    if scheme not in SCHEMES:
        raise ConfigError(
            f"quantization is {scheme!r}, but {source.reference} is not quantised; use "
            f"{', '.join(SCHEMES)} to quantise it while it loads, or leave it out"
        )
    if source.checkpoint is None:
        made = ((s.name, form_for(scheme, s.own_shape)) for s in _linear_sources(model))
        return source, tuple((name, form) for name, form in made if form is not None)
    names = linear_names(model, source.checkpoint)
    checkpoint = QuantisedOnLoad(source.checkpoint, scheme, names, stacks=True)
    return replace(source, checkpoint=checkpoint), forms_of(model.family, checkpoint)


def _linear_sources(model: Model) -> Iterator[Source]:
    specs = (spec for spec in model.param_specs if spec.is_linear)
    return (source for spec in specs if spec.path != "lm_head" for source in spec.sources)


def _stacked_sources(model: Model) -> Iterator[Source]:
    """Tensors of all experts of a layer, [E, I, O] unless they are quantised."""
    specs = (spec for spec in model.param_specs if spec.matrix == "experts_in_out")
    return (spec.sources[0] for spec in specs)


def _of_scheme(scheme: Scheme, model: Model) -> Iterator[tuple[str, Form]]:
    """The forms that a config's scheme implies, for random weights; other scales than fp8's are
    bfloat16. Raises ``CheckpointError`` for sizes that are refused in a checkpoint, too.
    """
    found = {source.name: source for source in _linear_sources(model)}
    found |= {source.name: source for source in _stacked_sources(model)}
    for source in found.values():
        weights = scheme.weights_of(source.name.removesuffix(".weight"))
        if weights is not None:
            outputs, inputs = source.own_shape if source.part is None else source.own_shape[::-1]
            groups = weights.num_groups(source.name, inputs)
            form = form_of(
                weights.kind,
                inputs,
                groups,
                "bfloat16",
                zeros=not weights.symmetric,
                block_outputs=weights.kept_block(outputs, groups),
            )
            check_fits(source.name, form, outputs, inputs)
            yield source.name, form
