"""The cache of converted weights: dequantised, laid out and cast as one model needs them.

Owns: the form of a cache entry, written and read with Orbax. Must not know: GGUF, tensor names.

An entry holds ``manifest.json`` and one Orbax checkpoint per group of parameters. Groups of some
64 MiB are built, put on the device and saved one after another, so host memory holds one group
beside the weights. An entry appears whole or not at all (``staging``); one that cannot be read is
therefore damaged, which is reported rather than repaired in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import build_once
from jaxinfer.models.base import Model, Params, TensorRule
from jaxinfer.models.tree import by_path, nested
from jaxinfer.weights.checkpoint import Checkpoint
from jaxinfer.weights.plan import PlannedParam

_FORMAT = 1  # of the entry; raise it when groups or manifest change
_GROUP_BYTES = 64 << 20
_MANIFEST = "manifest.json"


class _Manifest(msgspec.Struct, frozen=True):
    """``groups[i]`` maps the parameters of group i to their shapes; ``files`` to their sizes."""

    architecture: str
    config: str
    dtype: str
    groups: tuple[dict[str, tuple[int, ...]], ...]
    files: dict[str, int]


def entry_path(cache_dir: Path, fingerprint: str, model: Model) -> Path:
    """Where a checkpoint's weights are kept, converted for this very model."""
    rules = [_rule_identity(rule) for rule in model.tensor_rules]
    parts = (str(_FORMAT), fingerprint, model.architecture, repr(model.config), *rules)
    return cache_dir / "converted" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def convert(
    entry: Path,
    plan: Sequence[PlannedParam],
    checkpoint: Checkpoint,
    model: Model,
    progress: Progress,
) -> Params | None:
    """Convert, save and return the parameters; None when the entry is there already.

    Raises ``CacheError`` when the cache cannot be written.
    """
    dtype = np.dtype(model.config.dtype)
    params: dict[str, jax.Array] = {}

    def fill(folder: Path) -> None:
        groups = []
        total = sum(planned.nbytes for planned in plan)
        with progress.task("Converting weights", total) as advance, _orbax() as orbax:
            for index, members in enumerate(_groups(plan, dtype)):
                group: dict[str, np.ndarray] = {}
                for planned in members:
                    group[planned.rule.param] = planned.build(checkpoint, dtype)
                    advance(planned.nbytes)
                # From the host: given a GPU's arrays, Orbax would copy them back, and the process
                # died of it on an H200 (a segmentation fault, under XLA's vmm allocator).
                _save(orbax, folder / _group_name(index), group)
                groups.append({path: leaf.shape for path, leaf in group.items()})
                params.update({path: jax.device_put(array) for path, array in group.items()})
        manifest = _Manifest(
            architecture=model.architecture,
            config=repr(model.config),
            dtype=dtype.name,
            groups=tuple(groups),
            files=_file_sizes(folder),
        )
        (folder / _MANIFEST).write_bytes(msgspec.json.encode(manifest))

    return nested(params) if build_once(entry, fill) else None


def restore(entry: Path, progress: Progress) -> Params:
    """The parameters of an entry, on the default device.

    Raises ``CacheError`` naming the folder when it is damaged.
    """
    try:
        manifest = msgspec.json.decode((entry / _MANIFEST).read_bytes(), type=_Manifest)
        _check_files(entry, manifest)
        dtype = jax.numpy.dtype(manifest.dtype)
        params: dict[str, jax.Array] = {}
        total = sum(_nbytes(shape, dtype) for group in manifest.groups for shape in group.values())
        with progress.task("Loading weights", total) as advance, _orbax() as orbax:
            for index, shapes in enumerate(manifest.groups):
                group = _restore(orbax, entry / _group_name(index), shapes, dtype)
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
    orbax: ocp.Checkpointer, folder: Path, shapes: dict[str, tuple[int, ...]], dtype: np.dtype
) -> dict[str, jax.Array]:
    here = jax.device_put(0).sharding  # the default device
    leaves = {
        path: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for path, shape in shapes.items()
    }
    tree = nested(leaves)
    how = ocp.checkpoint_utils.construct_restore_args(tree)
    restored = orbax.restore(folder.absolute(), args=ocp.args.PyTreeRestore(tree, restore_args=how))
    return by_path(restored)


def _groups(plan: Iterable[PlannedParam], dtype: np.dtype) -> list[list[PlannedParam]]:
    """Neighbours together until a group is full; every parameter is in one group."""
    groups: list[list[PlannedParam]] = []
    room = 0
    for planned in plan:
        if room <= 0:
            groups.append([])
            room = _GROUP_BYTES
        groups[-1].append(planned)
        room -= sum(_nbytes(shape, dtype) for shape in planned.rule.shapes)
    return groups


def _rule_identity(rule: TensorRule) -> str:
    return f"{rule.param} {rule.sources} {rule.shapes} {rule.build.__qualname__}"


def _group_name(index: int) -> str:
    return f"group_{index:04d}"


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
