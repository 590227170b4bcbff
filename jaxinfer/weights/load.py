"""From a ``ModelSource`` to parameters on the device.

Owns: ``load_params``. Must not know: file formats, how a cache entry looks.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params
from jaxinfer.weights import converted
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import ModelSource
from jaxinfer.weights.tree import nested


def load_params(
    model: Model, source: ModelSource, *, cache_dir: Path, seed: int, progress: Progress
) -> Params:
    """The model's parameters on the default device, in ``model.config.dtype``.

    Quantised weights are converted once and then restored from the cache; ``seed`` is that of
    random weights. Raises ``CheckpointError`` before any data is read when the checkpoint does not
    fit the model, and ``CacheError`` when the cache cannot be written or is damaged.
    """
    if source.checkpoint is None:
        return dummy_params(model, seed=seed, progress=progress)
    plan = plan_params(model, source.checkpoint)
    if source.quantised:
        entry = converted.entry_path(cache_dir, source.fingerprint, model)
        params = converted.convert(entry, plan, source.checkpoint, model, progress)
        return converted.restore(entry, progress) if params is None else params
    with progress.task("Loading weights", sum(param.nbytes for param in plan)) as advance:
        params = {}
        for planned in plan:
            params[planned.rule.param] = jax.device_put(
                planned.build(source.checkpoint, np.dtype(model.config.dtype))
            )
            advance(planned.nbytes)
    return nested(params)
