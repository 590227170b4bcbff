"""The bundle: compiled executables on disk, so that the next start compiles nothing.

Owns: the folder's layout (``manifest.json`` and one file for each executable), and what is said of
a folder that is damaged or does not fit. A bundle holds code that is run: load only those of people
you trust.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.experimental import serialize_executable

from jaxinfer.core.config import BUNDLE_MANIFEST, Limits
from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.core.version import VERSION
from jaxinfer.exec.compile.fingerprint import (
    Fingerprint,
    differences,
    of_limits,
    of_machine,
    of_model,
    of_pins,
)
from jaxinfer.exec.compile.memory_plan import MemoryPlan, workspace_bytes
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.base import Model
from jaxinfer.nn.placement import Placement
from pallas_kernels.tuned import NAMES, read_choices, tuned_file

FORMAT = 4  # of the folder; raise it when the manifest's meaning changes
LOAD_THREADS = 16  # H200: 8 buckets load in 0.50 s on 8 threads, 1.96 s in turn


class StoredExecutable(msgspec.Struct, frozen=True):
    """One file. ``workspace_bytes`` is held while it runs beside weights, pages, slots, batch."""

    file: str
    size_bytes: int
    sha256: str
    workspace_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What a bundle says of itself.

    ``settings`` are the ``EngineConfig`` fields it decides; ``tuned`` is what ``tuned_choices``
    were when it was made.
    """

    format: int
    created_by: str
    created_at: str
    fingerprint: Fingerprint
    limits: Limits
    settings: dict[str, Any]
    memory: MemoryPlan
    tuned: dict[str, Any]
    executables: dict[str, StoredExecutable]

    @property
    def workspace_bytes(self) -> int:
        """What the largest executable takes; one runs at a time."""
        return max(stored.workspace_bytes for stored in self.executables.values())


@dataclass(frozen=True)
class Bundle:
    """A folder whose files are all what its manifest says."""

    folder: Path
    manifest: Manifest

    def refuse_machine(self, placement: Placement) -> None:
        """Raise ``CacheError`` unless this installation and devices are those it was made for."""
        self._refuse(self.manifest.fingerprint.machine, of_machine(placement))

    def refuse_model(self, model: Model) -> None:
        """Raise ``CacheError`` unless it was made for this model."""
        self._refuse(self.manifest.fingerprint.model, of_model(model))

    def refuse_program(self, program: Program, names: Collection[str]) -> None:
        """Raise ``CacheError`` unless it was made for these sizes and kernels, and has all of these
        executables.
        """
        self._refuse(self.manifest.fingerprint.limits, of_limits(program.limits))
        self._refuse(self.manifest.fingerprint.kernels, of_pins(program.pins))
        if missing := set(names) - self.manifest.executables.keys():
            raise _damaged(self.folder, f"its manifest has no {', '.join(sorted(missing))}")

    def load(self, name: str) -> jax.stages.Compiled:
        """One executable; raises ``CacheError`` naming a file that cannot be used."""
        stored = self.manifest.executables[name]
        path = self.folder / stored.file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _damaged(self.folder, f"{path} cannot be read: {error.strerror}") from error
        # again: what is loaded late may have changed since
        _check_content(self.folder, content, stored)
        try:
            return serialize_executable.deserialize_and_load(*pickle.loads(content))
        except Exception as error:  # pickle and XLA raise anything on what they cannot read
            raise _damaged(self.folder, f"{path}: {type(error).__name__}: {error}") from error

    def _refuse(self, made_for: Mapping[str, str], here: Mapping[str, str]) -> None:
        if different := differences(made_for, here):
            more = ", ".join(one.field for one in different[1:])
            raise CacheError(
                f"the bundle {self.folder} does not fit: {different[0]}"
                f"{f' (also different: {more})' if more else ''}; compile another one"
            )


def program_fingerprint(program: Program) -> Fingerprint:
    """Everything that the executables of a program depend on, here."""
    return Fingerprint(
        of_machine(program.placement),
        of_model(program.model),
        of_limits(program.limits),
        of_pins(program.pins),
    )


def tuned_choices(placement: Placement) -> dict[str, Any]:
    """The kernels' tuned launches for this kind of device: by name in ``NAMES``, then by case."""
    kind = placement.device.device_kind
    choices = {name: read_choices(tuned_file(name, kind)) for name in NAMES}
    return {name: found for name, found in choices.items() if found}


def open_bundle(folder: Path) -> Bundle:
    """Read the manifest and check every file against it.

    Raises ``CacheError`` naming the file that is missing, cut short, changed or of another format.
    """
    path = folder / BUNDLE_MANIFEST
    if not folder.is_dir():
        raise CacheError(f"there is no bundle {folder}; make one with `jaxinfer compile`")
    try:
        content = path.read_bytes()
        made = msgspec.json.decode(content, type=_Format).format
        if made != FORMAT:
            raise CacheError(
                f"the bundle {folder} does not fit: format is {made} in the bundle and {FORMAT} "
                "here; compile another one"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise _damaged(folder, f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise _damaged(folder, f"{path} is no manifest: {error}") from error
    # hashing holds no lock; in turn it takes 0.4 s on an H200
    with ThreadPoolExecutor(load_threads()) as pool:
        list(pool.map(partial(_check_file, folder), manifest.executables.values()))
    return Bundle(folder, manifest)


def load_bundle(
    bundle: Bundle, progress: Progress, names: Collection[str]
) -> dict[str, jax.stages.Compiled]:
    """These executables of a bundle that fits; raises ``CacheError`` naming an unusable file."""
    load_kernel_runtime()
    pool = ThreadPoolExecutor(load_threads())
    under_way = {pool.submit(bundle.load, name): name for name in names}
    loaded: dict[str, jax.stages.Compiled] = {}
    try:
        with progress.task("load executables", len(names)) as advance:
            for future in as_completed(under_way):
                loaded[under_way[future]] = future.result()
                advance(1)
    finally:  # Ctrl-C included: nobody needs the others
        pool.shutdown(wait=False, cancel_futures=True)
    return loaded


def executable_file(
    program: Program, name: str, compiled: jax.stages.Compiled
) -> tuple[StoredExecutable, bytes]:
    """One file of a bundle: what the manifest says of it, and its content."""
    content = pickle.dumps(serialize_executable.serialize(compiled))
    digest = hashlib.sha256(content).hexdigest()
    workspace = workspace_bytes(compiled) + program.carried_bytes(name, compiled)
    return StoredExecutable(f"{name}.bin", len(content), digest, workspace), content


def write_manifest(
    folder: Path,
    program: Program,
    memory: MemoryPlan,
    executables: Mapping[str, StoredExecutable],
    settings: Mapping[str, Any],
) -> Manifest:
    """Write what makes a bundle of a folder with every executable.

    ``settings`` are the engine's, for whoever gives the bundle instead of them.
    """
    manifest = Manifest(
        format=FORMAT,
        created_by=f"jaxinfer {VERSION}",
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        fingerprint=program_fingerprint(program),
        limits=program.limits,
        settings=dict(settings),
        memory=memory,
        tuned=tuned_choices(program.placement),
        executables=dict(executables),
    )
    (folder / BUNDLE_MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def load_threads() -> int:
    """Threads that load executables, or read their files, side by side."""
    return min(LOAD_THREADS, os.cpu_count() or 1)


def load_kernel_runtime() -> None:
    """Mosaic kernels call a library that only their Python module loads: without it an executable
    that holds some does not load in a process that has compiled none ("Failed to materialize").

    It also adds to the environment, so it comes before any thread compiles: XLA starts ptxas with
    that environment. (Suspected of 2 starts in 16 that ended with "Failed to launch ptxas".)
    """
    if jax.default_backend() == "gpu":
        with suppress(ImportError):  # of a jax without it, which has compiled no such kernel either
            importlib.import_module("jax.experimental.mosaic.gpu")


class _Format(msgspec.Struct):
    """What every manifest of every format has."""

    format: int


def _damaged(folder: Path, what: str) -> CacheError:
    return CacheError(
        f"the executables in {folder} cannot be used ({what}); delete that folder, then run or "
        "compile again"
    )


def _check_file(folder: Path, stored: StoredExecutable) -> None:
    path = folder / stored.file
    if not path.is_file():
        raise _damaged(folder, f"{path} is missing")
    if (size := path.stat().st_size) != stored.size_bytes:
        raise _damaged(folder, f"{path} has {size} of {stored.size_bytes} bytes")
    _check_content(folder, path.read_bytes(), stored)


def _check_content(folder: Path, content: bytes, stored: StoredExecutable) -> None:
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise _damaged(folder, f"{folder / stored.file} is not what its manifest says")
