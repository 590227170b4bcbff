"""Floor 3: one file per model family, found through the registry.

Research imports ``forward`` and ``build_model`` from here.
"""

from jaxinfer.models.base import Model, ModelFamily, Params, TensorRule, abstract_params, forward
from jaxinfer.models.registry import build_model, family_for, known_architectures

__all__ = [
    "Model",
    "ModelFamily",
    "Params",
    "TensorRule",
    "abstract_params",
    "build_model",
    "family_for",
    "forward",
    "known_architectures",
]
