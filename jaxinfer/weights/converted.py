"""The cache of converted weights: dequantised, laid out and cast as one model needs them.

An entry holds ``manifest.json`` and one Orbax checkpoint per group of parameters. Groups of about
64 MiB, or of one larger parameter, are built, saved and put on the devices one at a time, so that
host memory holds one group in addition to the weights. An entry is renamed into place when it is
complete (``staging``), so an entry that cannot be read is damaged: this is an error, not repaired.
Orbax's arrays have no checksums: of 1,000 flipped bits it read 89 as other weights. So the manifest
has each file's hash, which is checked whenever the file may have changed (``core.stamps``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.core.errors import CacheError
from jaxinfer.core.json_text import read_json
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import build_once, replace_trusted
from jaxinfer.core.stamps import Known, is_unchanged, known
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import ParamSpec, by_path, nested
from jaxinfer.models.place import placed_leaves
from jaxinfer.models.sources import ArraySpec
from jaxinfer.nn.placement import Placement
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.plan import PlannedParam

_FORMAT = 4  # version of the entry's format; raise it when groups or manifest change
_GROUP_BYTES = 64 << 20
_MANIFEST = "manifest.json"  # of the entry's other files: the hash and the stamp, by name
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)


def entry_path(cache_dir: Path, fingerprint: str, model: Model) -> Path:
    """The folder for a checkpoint's weights, converted for this model, which is not divided."""
    made_for = "1 devices"  # arrays are whole; several devices take their parts of them
    specs = [_identity(spec) for spec in model.param_specs]
    parts = (str(_FORMAT), fingerprint, model.architecture, repr(model.config), made_for, *specs)
    return cache_dir / "converted" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def convert(
    entry: Path,
    plan: Sequence[PlannedParam],
    checkpoint: Checkpoint,
    model: Model,
    placement: Placement,
    progress: Progress,
) -> Params | None:
    """Convert, save and return the parameters; None if the entry exists already.

    ``plan`` is that of the model that is not divided, ``model`` may be. Raises ``CacheError`` when
    the cache cannot be written.
    """
    params: dict[str, jax.Array] = {}

    def fill(folder: Path) -> None:
        total = sum(planned.nbytes for planned in plan)
        with progress.task("convert weights", total, "B") as advance, _orbax() as orbax:
            for index, members in enumerate(_groups(plan)):
                group: dict[str, np.ndarray] = {}
                for planned in members:
                    group |= planned.whole(checkpoint)
                    advance(planned.nbytes)
                # Save host arrays: Orbax copies a GPU's arrays back to the host, which crashed on
                # an H200 (a segmentation fault, with XLA's vmm allocator).
                _save(orbax, folder / _group_name(index), group)
                params.update(placed_leaves(group, model, placement))
        files = (path for path in folder.rglob("*") if path.is_file())
        hashed = _hashed(folder, (str(path.relative_to(folder)) for path in files))
        (folder / _MANIFEST).write_text(json.dumps(hashed))

    return nested(params) if build_once(entry, fill, root=entry.parent.parent) else None


def restore(
    entry: Path,
    plan: Sequence[PlannedParam],
    model: Model,
    placement: Placement,
    progress: Progress,
) -> Params:
    """The parameters of an entry, placed as ``load_params`` does; see ``convert``.

    A divided model's are read by group into host memory, from which devices take parts. Raises
    ``CacheError`` with the folder's name when it is damaged.
    """
    try:
        _check_files(entry)
        params: dict[str, jax.Array] = {}
        total = sum(_nbytes(planned) for planned in plan)
        with progress.task("load weights", total, "B") as advance, _orbax() as orbax:
            for index, members in enumerate(_groups(plan)):
                group = {
                    path: _abstract(array, model, placement)
                    for planned in members
                    for path, array in planned.arrays.items()
                }
                restored = _restore(orbax, entry / _group_name(index), group)
                if model.devices > 1:
                    restored = placed_leaves(restored, model, placement)
                params |= restored
                advance(sum(map(_nbytes, members)))
    except Exception as error:
        is_damage = isinstance(error, _DAMAGE) or type(error) is Exception  # Orbax raises that, too
        if not is_damage:
            raise
        raise CacheError(
            f"the converted weights in {entry} are damaged ({_first_line(error)}); "
            "delete that folder and run again"
        ) from error
    return nested(params)


def _abstract(array: ArraySpec, model: Model, placement: Placement) -> Any:
    """The argument that lets Orbax restore an array on the devices, or one of numpy."""
    if model.devices > 1:
        return np.empty(array.shape, array.dtype)
    sharding = placement.sharding(array.axes)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _hashed(folder: Path, names: Iterable[str]) -> dict[str, Known]:
    names = tuple(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(known, (folder / name for name in names)), strict=True))


def _check_files(entry: Path) -> None:
    """Raise ``ValueError`` for a file that is not as it was saved, ``OSError`` if it is missing."""
    saved = {name: Known(*one) for name, one in read_json(entry / _MANIFEST).items()}
    changed = [name for name, one in saved.items() if not is_unchanged(entry / name, one)]
    hashed = _hashed(entry, changed)
    for name, now in hashed.items():
        if now.sha256 != saved[name].sha256:
            raise ValueError(f"{name} has the SHA-256 {now.sha256}, not {saved[name].sha256[:64]}")
    if hashed:
        with suppress(OSError):  # a cache that cannot be written is hashed at every start
            replace_trusted(entry / _MANIFEST, json.dumps(saved | hashed).encode())


def _orbax() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _save(orbax: ocp.Checkpointer, folder: Path, group: dict[str, np.ndarray]) -> None:
    try:
        orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(nested(group)))
    except ValueError as error:  # tensorstore raises it when a write fails
        raise OSError(_first_line(error)) from error


def _restore(orbax: ocp.Checkpointer, folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    tree = nested(saved)
    how = ocp.checkpoint_utils.construct_restore_args(tree)
    restored = orbax.restore(folder.absolute(), args=ocp.args.PyTreeRestore(tree, restore_args=how))
    return by_path(restored)


def _groups(plan: Iterable[PlannedParam]) -> list[list[PlannedParam]]:
    """Split the plan into groups of consecutive parameters, about ``_GROUP_BYTES`` each."""
    groups: list[list[PlannedParam]] = []
    free_bytes = 0
    for planned in plan:
        if free_bytes <= 0:
            groups.append([])
            free_bytes = _GROUP_BYTES
        groups[-1].append(planned)
        free_bytes -= _nbytes(planned)
    return groups


def _nbytes(planned: PlannedParam) -> int:
    return sum(array.nbytes for array in planned.arrays.values())


def _identity(spec: ParamSpec) -> str:
    """Everything besides the checkpoint that determines the content of a parameter's arrays."""
    build = getattr(spec.build, "__qualname__", None) or repr(spec.build)  # or a record's fields
    return f"{spec.leaves} {spec.sources} {spec.build.__module__}.{build} {spec.pieces}"


def _group_name(index: int) -> str:
    return f"group_{index:04d}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
