"""A model for research: the very weights and functions that serve, without an engine around them.

Owns: ``load``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.core.config import DEFAULT_MODEL, EngineConfig
from jaxinfer.core.progress import NoProgress, Progress
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.models.base import Model, Params
from jaxinfer.weights.load import load_params

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class Loaded(NamedTuple):
    """A model in memory; ``jaxinfer.models.forward(model, params, token_ids)`` runs it."""

    model: Model
    params: Params
    tokenizer: Tokenizer | None


def load(
    model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **settings: Any
) -> Loaded:
    """A model, its parameters on the default device, and its tokenizer.

    ``model`` is what ``LLM`` takes: a short name, a folder, a GGUF file or a config.json. Settings
    are those of ``EngineConfig``, of which ``dtype``, ``load_format``, ``max_model_len``,
    ``tokenizer`` and ``seed`` matter here. Raises a ``JaxinferError`` naming what does not fit.
    """
    progress = progress or NoProgress()
    plan = plan_engine(EngineConfig(model=model, **settings), progress)
    params = load_params(
        plan.model,
        plan.source,
        placement=plan.placement,
        cache_dir=plan.cache_dir,
        seed=plan.config.seed,
        progress=progress,
    )
    return Loaded(plan.model, params, plan.tokenizer)
