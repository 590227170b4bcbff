"""``load``: a model for research, the weights and functions that serve, without an engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxinfer.core.errors import ArgumentError, NoTokenizerError
from jaxinfer.core.progress import Progress
from jaxinfer.engine.api.language_model import LanguageModel
from jaxinfer.engine.api.own_engine import OwnEngines
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.exec.run.device_memory import check_host


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
    ``seed`` have an effect on the parameters, the others on ``LanguageModel.generate``. A model
    without a tokenizer takes token ids. Quantised weights are dequantised on a CPU, so that all
    parameters have gradients; ``cpu_weights="auto"`` keeps them.

    ``mesh`` is a mesh of one device, or one with an axis of several, along which heads,
    feed-forward columns and the vocabulary are divided: ``forward`` then runs on all of them, also
    under ``jax.jit`` and ``jax.grad``, and so does ``generate``, which keeps a second copy of the
    weights, in the order of steps. ``tensor_parallel_size`` in place of a mesh takes the first
    devices. Raises a ``JaxinferError`` if the model cannot be loaded, or not be divided.
    """
    settings = {"cpu_weights": "float32", "prefill_first": True, **settings}
    if settings.get("num_hosts", 1) != 1:
        raise ArgumentError("jaxinfer.load keeps parameters on one host; leave out num_hosts")
    progress = progress or progress_on(sys.stderr)

    def planned(settings: Mapping[str, Any]) -> EnginePlan:
        return plan_engine(engine_config(model, settings), progress, mesh=mesh)

    missing = "load it without skip_tokenizer_init"
    try:
        plan = planned(settings)
    except NoTokenizerError as error:
        if "tokenizer" in settings:
            raise
        missing, settings = str(error), settings | {"skip_tokenizer_init": True}
        plan = planned(settings)
    _check_division(plan)
    check_host(plan.memory)
    params = plan.load_whole(progress)
    generate = partial(OwnEngines(plan, settings, planned).generate, progress)
    return LanguageModel(
        plan.program.model.whole,
        params,
        plan.tokenizer,
        plan.source.generation_config,
        generate,
        plan.source.reference,
        missing,
    )


def _check_division(plan: EnginePlan) -> None:
    """Raise ``ArgumentError`` for a parameter that cannot be divided among the devices."""
    placement = plan.program.placement
    for path, array in plan.program.model.whole.arrays.items():
        try:
            placement.sharding(array.axes).shard_shape(array.shape)
        except ValueError:
            raise ArgumentError(
                f"parameter {path} {list(array.shape)} cannot be divided among "
                f"{placement.num_devices} devices; use a mesh of fewer"
            ) from None
