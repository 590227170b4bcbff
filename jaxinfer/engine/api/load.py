"""``load``: a model for research, the weights and functions that serve, without an engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxinfer.core.errors import ArgumentError
from jaxinfer.core.progress import Progress
from jaxinfer.engine.api.language_model import LanguageModel
from jaxinfer.engine.api.llm import LLM
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.start.build import build_engine, plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.exec.run.device_memory import check_host
from jaxinfer.models.base import Params


def load(
    model: str | None = None,
    *,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LanguageModel:
    """Load a model, its parameters onto the default device or a mesh, and its tokenizer.

    ``model`` is a short name, a name of the hub (``ORG/NAME``), a folder, a GGUF file or a
    config.json, as for ``LLM``. Settings are those of ``LLM``: ``revision``, ``dtype``,
    ``load_format``, ``max_model_len``, ``tokenizer``, ``quantization``, ``cpu_weights`` and
    ``seed`` have an effect on the parameters, the others on ``LanguageModel.generate``. Quantised
    weights are dequantised on a CPU, so that all parameters have gradients; ``cpu_weights="auto"``
    keeps them.

    ``mesh`` is a mesh of one device, or one with an axis of several, along which heads,
    feed-forward columns and the vocabulary are divided: ``forward`` then runs on all of them, also
    under ``jax.jit`` and ``jax.grad``, and ``generate``, which needs one device, is refused. Raises
    a ``JaxinferError`` if the model cannot be loaded, or not be divided.
    """
    settings = {"cpu_weights": "float32", "prefill_first": True, **settings}
    progress = progress or progress_on(sys.stderr)
    plan = plan_engine(engine_config(model, settings), progress, mesh=mesh)
    _check_division(plan)
    check_host(plan.memory)
    params = plan.load_params(progress)
    generate = _OwnEngine(plan, progress).generate
    config = plan.source.generation_config
    return LanguageModel(plan.program.model, params, plan.tokenizer, config, generate)


def _check_division(plan: EnginePlan) -> None:
    """Raise ``ArgumentError`` for a parameter that cannot be divided among the devices."""
    placement = plan.program.placement
    for path, array in plan.program.model.arrays.items():
        try:
            placement.sharding(array.axes).shard_shape(array.shape)
        except ValueError:
            raise ArgumentError(
                f"parameter {path} {list(array.shape)} cannot be divided among "
                f"{placement.num_devices} devices; use a mesh of fewer"
            ) from None


class _OwnEngine:
    """The engine of a loaded model, built when it is first used."""

    def __init__(self, plan: EnginePlan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._llm: LLM | None = None
        self._params: Params | None = None  # that the engine serves

    def generate(self, params: Params, *arguments: Any, **options: Any) -> list[RequestOutput]:
        """``LLM.generate`` with these weights, which ``LanguageModel.with_params`` may replace."""
        if self._llm is None:
            engine = build_engine(replace(self._plan, loaded=params), self._progress)
            self._llm = LLM.of_engine(engine, self._plan.config, self._progress)
        elif self._params is not params:
            self._llm.update_weights(params)
        self._params = params
        return self._llm.generate(*arguments, **options)
