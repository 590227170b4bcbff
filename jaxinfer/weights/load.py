"""From a ``ModelSource`` to parameters on the device.

Owns: ``load_params``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params
from jaxinfer.models.tree import nested
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.plan import PlannedParam, plan_params
from jaxinfer.weights.sources import ModelSource

LOAD_THREADS = 8  # each holds one parameter in host memory


def load_params(
    model: Model, source: ModelSource, *, cache_dir: Path, seed: int, progress: Progress
) -> Params:
    """The model's parameters on the default device.

    Quantised weights are converted once and then restored from the cache; ``seed`` is that of
    random weights. Raises ``CheckpointError`` before any data is read when the checkpoint does not
    fit the model, and ``CacheError`` when the cache cannot be written or is damaged.
    """
    if source.checkpoint is None:
        return dummy_params(model, seed=seed, progress=progress)
    plan = plan_params(model, source.checkpoint)
    if source.quantised:
        from jaxinfer.weights import converted  # Orbax, a fifth of what all imports take

        entry = converted.entry_path(cache_dir, source.fingerprint, model)
        params = converted.convert(entry, plan, source.checkpoint, model, progress)
        return converted.restore(entry, progress) if params is None else params
    return nested(_stream(plan, source.checkpoint, progress))


def _stream(
    plan: Sequence[PlannedParam], checkpoint: Checkpoint, progress: Progress
) -> dict[str, jax.Array]:
    """Read, lay out and put each parameter on the device, a few at a time.

    The host holds what the threads are at, beside what a CPU's device holds.
    """
    pool = ThreadPoolExecutor(min(LOAD_THREADS, os.cpu_count() or 1))
    with progress.task("Loading weights", sum(param.nbytes for param in plan)) as advance:

        def one(planned: PlannedParam) -> jax.Array:
            array = jax.device_put(planned.build(checkpoint))
            advance(planned.nbytes)
            return array

        try:
            names = [planned.rule.param for planned in plan]
            return dict(zip(names, pool.map(one, plan), strict=True))
        finally:  # after a failure or Ctrl-C, nobody needs the rest
            pool.shutdown(wait=False, cancel_futures=True)
