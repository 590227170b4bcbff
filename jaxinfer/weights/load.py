"""Loads the parameters of a ``ModelSource`` onto the devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.core.progress import Progress
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import ParamSpec, by_path, nested
from jaxinfer.nn.placement import Placement
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.dummy import dummy_params
from jaxinfer.weights.plan import PlannedParam, plan_params
from jaxinfer.weights.sources import ModelSource
from jaxinfer.weights.stacked import StackedArray
from jaxinfer.weights.uses import note_use

LOAD_THREADS = 16  # each holds one parameter, or one piece of a stack, in host memory


def load_params(
    model: Model,
    source: ModelSource,
    *,
    placement: Placement,
    cache_dir: Path,
    seed: int,
    progress: Progress,
) -> Params:
    """The model's parameters, placed by the logical axes of their specs.

    Weights that are dequantised are converted once and then restored from the cache. ``seed`` is
    used only for random weights. Raises ``CheckpointError`` before any data is read if the
    checkpoint does not fit the model, and ``CacheError`` if the cache cannot be written or is
    damaged.
    """
    if source.checkpoint is None:
        return dummy_params(model, placement=placement, seed=seed, progress=progress)
    if source.quantised and not model.forms:
        from jaxinfer.weights import converted  # Orbax takes a fifth of the total import time

        plan = plan_params(model.whole, source.checkpoint)
        entry = converted.entry_path(cache_dir, source.fingerprint, model.whole)
        note_use(cache_dir, source.files, entry)
        params = converted.convert(entry, plan, source.checkpoint, model, placement, progress)
        return (
            converted.restore(entry, plan, model, placement, progress) if params is None else params
        )
    plan = plan_params(model, source.checkpoint)
    return nested(stream_params(plan, source.checkpoint, placement, progress))


def stream_params(
    plan: Sequence[PlannedParam],
    checkpoint: Checkpoint,
    placement: Placement,
    progress: Progress,
    threads: int | None = None,
) -> dict[str, jax.Array]:
    """Read, lay out and put each parameter on the devices, ``threads`` (None: ``LOAD_THREADS``) at
    a time; by path.

    Host memory holds only the parameters that the threads currently read (and, on a CPU, all). The
    largest come first: what a parameter needs while it is laid out, as much again, is then free for
    those that follow. An embedding of 240 MB that came last raised the peak by as much.
    """
    plan = sorted(plan, key=lambda planned: planned.nbytes, reverse=True)
    pool = ThreadPoolExecutor(min(threads or LOAD_THREADS, os.cpu_count() or 1))
    with progress.task("load weights", sum(param.nbytes for param in plan), "B") as advance:

        def load(planned: PlannedParam) -> dict[str, jax.Array]:
            placed = _placed(planned, checkpoint, placement)
            advance(planned.nbytes)
            return placed

        try:
            loaded: dict[str, jax.Array] = {}
            for arrays in pool.map(load, plan):
                loaded |= arrays
            return loaded
        finally:  # after a failure or Ctrl-C the other parameters are not needed
            pool.shutdown(wait=False, cancel_futures=True)


def _placed(
    planned: PlannedParam, checkpoint: Checkpoint, placement: Placement
) -> dict[str, jax.Array]:
    """The arrays of one parameter, by path. Each device receives only its own part."""
    if planned.spec.devices < placement.num_devices:
        return _spread(planned, checkpoint, placement)
    if planned.spec.pieces is None:
        own = placement.own_ranks
        made = zip(planned.parts(checkpoint, kept=own), placement.own_devices, strict=True)
        parts = [_on_device(planned.spec, part, device) for part, device in made]
        arrays = planned.arrays.items()
        return {
            path: placement.of_parts([part[path] for part in parts], array.axes)
            for path, array in arrays
        }
    stacks = {
        path: StackedArray(spec.shape, np.dtype(spec.dtype), placement, spec.axes)
        for path, spec in planned.arrays.items()
    }
    for index in range(planned.spec.pieces):
        _set_piece(stacks, planned, checkpoint, placement, index)
    return {path: stack.array() for path, stack in stacks.items()}


def _spread(
    planned: PlannedParam, checkpoint: Checkpoint, placement: Placement
) -> dict[str, jax.Array]:
    """A whole parameter, spread over several devices as functions of whole arrays have it."""
    made, arrays, spec = planned.whole(checkpoint), planned.arrays.items(), planned.spec
    placed = {path: placement.put(made[path], array.axes) for path, array in arrays}
    if spec.pieces is not None and (finish := spec.finish) is not None:
        spec = replace(spec, finish=partial(jax.lax.map, finish))
    return _finished(spec, placed)


def _set_piece(
    stacks: Mapping[str, StackedArray],
    planned: PlannedParam,
    checkpoint: Checkpoint,
    placement: Placement,
    index: int,
) -> None:
    """Set a piece of each stack on the devices that have a part of it.

    The device then holds one piece twice; to finish the stack would need as much memory again. No
    variable of the caller holds a piece while the next one is read.
    """
    own = placement.own_ranks
    ranks = [rank for rank in planned.spec.ranks_of(index) if rank in own]
    for rank, part in zip(ranks, planned.parts(checkpoint, index, own), strict=True):
        made: Mapping[str, np.ndarray | jax.Array] = part
        if planned.spec.finish is not None:
            made = _on_device(planned.spec, part, placement.devices[rank])
        for path, array in made.items():
            stacks[path].set(rank, index, array)


def _on_device(
    spec: ParamSpec, arrays: Mapping[str, np.ndarray], device: Any
) -> dict[str, jax.Array]:
    """The arrays of a device's part of a parameter, or of a piece, there and finished, by path."""
    placed = {path: jax.device_put(array, device) for path, array in arrays.items()}
    return _finished(spec, placed)


def _finished(spec: ParamSpec, placed: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays by path after ``ParamSpec.finish``."""
    if spec.finish is None:
        return placed
    prefix = f"{spec.path}/"
    tree = nested({path.removeprefix(prefix): array for path, array in placed.items()})
    return {prefix + path: array for path, array in by_path(spec.finish(tree)).items()}
