"""Floor 3: one file per model family, found through the registry.

Research imports ``forward``, ``hidden_states``, ``unembed`` and ``build_model`` from here.
"""

from jaxinfer.models.base import (
    Model,
    ModelFamily,
    Params,
    abstract_params,
    forward,
    hidden_states,
    normalised_stream,
    unembed,
)
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.registry import build_model, family_for, known_architectures
from jaxinfer.models.sources import ArraySpec, Source

__all__ = [
    "ArraySpec",
    "Model",
    "ModelFamily",
    "ParamSpec",
    "Params",
    "Source",
    "abstract_params",
    "build_model",
    "family_for",
    "forward",
    "hidden_states",
    "known_architectures",
    "normalised_stream",
    "unembed",
]
