"""The cache of converted weights: dequantised, laid out and cast as one model needs them.

Owns: the form of a cache entry, written and read with Orbax.

An entry holds ``manifest.json`` and one Orbax checkpoint per group of parameters. Groups of some
64 MiB, or of one larger parameter, are built, saved and put on the devices one after another, so
host memory holds one group beside the weights. An entry appears whole or not at all (``staging``);
one that cannot be read is therefore damaged, which is reported rather than repaired in silence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import build_once
from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import ParamSpec
from jaxinfer.models.tree import by_path, nested
from jaxinfer.nn.placement import Placement
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.plan import PlannedParam

_FORMAT = 2  # of the entry; raise it when groups or manifest change
_GROUP_BYTES = 64 << 20
_MANIFEST = "manifest.json"


class _Saved(msgspec.Struct, frozen=True):
    """One parameter of a group."""

    dtype: str
    shape: tuple[int, ...]

    def abstract(self, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jax.numpy.dtype(self.dtype), sharding=where)


class _Manifest(msgspec.Struct, frozen=True):
    """``groups[i]`` has the parameters of group i; ``files`` maps files to their sizes."""

    architecture: str
    config: str
    groups: tuple[dict[str, _Saved], ...]
    files: dict[str, int]


def entry_path(cache_dir: Path, fingerprint: str, model: Model, placement: Placement) -> Path:
    """Where a checkpoint's weights are kept, converted for this very model. Fused dimensions are
    in the order of shards, so the entry is also for this number of devices.
    """
    made_for = f"{placement.num_devices} devices"
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
    """Convert, save and return the parameters; None when the entry is there already.

    Raises ``CacheError`` when the cache cannot be written.
    """
    params: dict[str, jax.Array] = {}

    def fill(folder: Path) -> None:
        groups = []
        total = sum(planned.nbytes for planned in plan)
        with progress.task("Converting weights", total) as advance, _orbax() as orbax:
            for index, members in enumerate(_groups(plan)):
                group: dict[str, np.ndarray] = {}
                for planned in members:
                    group |= planned.whole(checkpoint, placement)
                    advance(planned.nbytes)
                # From the host: given a GPU's arrays, Orbax would copy them back, and the process
                # died of it on an H200 (a segmentation fault, under XLA's vmm allocator).
                _save(orbax, folder / _group_name(index), group)
                groups.append(
                    {path: _Saved(leaf.dtype.name, leaf.shape) for path, leaf in group.items()}
                )
                for path, array in group.items():
                    params[path] = placement.put(array, model.arrays[path].axes)
        manifest = _Manifest(
            architecture=model.architecture,
            config=repr(model.config),
            groups=tuple(groups),
            files=_file_sizes(folder),
        )
        (folder / _MANIFEST).write_bytes(msgspec.json.encode(manifest))

    return nested(params) if build_once(entry, fill) else None


def restore(entry: Path, model: Model, placement: Placement, progress: Progress) -> Params:
    """The parameters of an entry, placed as ``load_params`` does.

    Raises ``CacheError`` naming the folder when it is damaged.
    """
    try:
        manifest = msgspec.json.decode((entry / _MANIFEST).read_bytes(), type=_Manifest)
        _check_files(entry, manifest)
        params: dict[str, jax.Array] = {}
        groups = [
            {
                path: one.abstract(placement.sharding(model.arrays[path].axes))
                for path, one in members.items()
            }
            for members in manifest.groups
        ]
        leaves = (leaf for group in groups for leaf in group.values())
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        with progress.task("Loading weights", total) as advance, _orbax() as orbax:
            for index, members in enumerate(groups):
                group = _restore(orbax, entry / _group_name(index), members)
                params.update(group)
                advance(sum(leaf.nbytes for leaf in group.values()))
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise CacheError(
            f"the converted weights in {entry} are damaged ({_first_line(error)}); "
            "delete that folder and run again"
        ) from error
    return nested(params)


def _file_sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _check_files(entry: Path, manifest: _Manifest) -> None:
    """Find cut and missing files first: how Orbax answers them differs from case to case."""
    sizes = _file_sizes(entry)
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            raise ValueError(f"{name} has {sizes.get(name, 0)} of {size} bytes")


def _orbax() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _save(orbax: ocp.Checkpointer, folder: Path, group: dict[str, np.ndarray]) -> None:
    try:
        orbax.save(folder.absolute(), args=ocp.args.PyTreeSave(nested(group)))
    except ValueError as error:  # what tensorstore raises when a write fails
        raise OSError(_first_line(error)) from error


def _restore(
    orbax: ocp.Checkpointer, folder: Path, saved: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    tree = nested(saved)
    how = ocp.checkpoint_utils.construct_restore_args(tree)
    restored = orbax.restore(folder.absolute(), args=ocp.args.PyTreeRestore(tree, restore_args=how))
    return by_path(restored)


def _groups(plan: Iterable[PlannedParam]) -> list[list[PlannedParam]]:
    """Neighbours together until a group is full; every parameter is in one group."""
    groups: list[list[PlannedParam]] = []
    room = 0
    for planned in plan:
        if room <= 0:
            groups.append([])
            room = _GROUP_BYTES
        groups[-1].append(planned)
        arrays = planned.arrays.values()
        room -= sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)
    return groups


def _identity(spec: ParamSpec) -> str:
    """All that decides the content of a parameter's arrays beside the checkpoint."""
    build = f"{spec.build.__module__}.{spec.build.__qualname__}"
    return f"{spec.leaves} {spec.sources} {build} {spec.pieces}"


def _group_name(index: int) -> str:
    return f"group_{index:04d}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
