"""A model for research: the weights and functions that serve, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.core.config import DEFAULT_MODEL, EngineConfig
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.models.base import Model, Params

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class Loaded(NamedTuple):
    """A loaded model; ``jaxinfer.models.forward(model, params, token_ids)`` runs it."""

    model: Model
    params: Params
    tokenizer: Tokenizer | None


def load(
    model: str = DEFAULT_MODEL, *, progress: Progress = NO_PROGRESS, **settings: Any
) -> Loaded:
    """Load a model, its parameters onto the default device, and its tokenizer.

    ``model`` is a short name, a folder, a GGUF file or a config.json, as for ``LLM``. Settings are
    those of ``EngineConfig``; ``dtype``, ``load_format``, ``max_model_len``, ``tokenizer``,
    ``quantization``, ``cpu_weights`` and ``seed`` have an effect here. Quantised weights are
    dequantised on a CPU, so that all parameters have gradients; ``cpu_weights="auto"`` keeps them.
    Raises a ``JaxinferError`` if the model cannot be loaded.
    """
    settings = {"cpu_weights": "float32", **settings}
    plan = plan_engine(EngineConfig(model=model, **settings), progress)
    return Loaded(plan.program.model, plan.load_params(progress), plan.tokenizer)
