"""The bundle: compiled executables on disk, so that the next start compiles nothing.

Owns: the folder's layout (``manifest.json`` and one file for each executable), and the errors of a
folder that is damaged or does not fit. A bundle contains code that is executed: load only trusted
ones.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
from jax.experimental import serialize_executable

from jaxinfer.core.config import BUNDLE_MANIFEST, prepare_mosaic
from jaxinfer.core.errors import CacheError
from jaxinfer.core.json_text import read_json
from jaxinfer.core.limits import Limits
from jaxinfer.core.owners import check_tree
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import write_trusted
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
from pallas_kernels.harness.tuned import NAMES, read_choices, tuned_file
from pallas_kernels.native.library import register

FORMAT = 4  # version of the folder's format; raise it when the manifest's meaning changes
# that load executables or read their files; H200: 8 buckets load in 0.50 s with 8 (1.96 s with one)
NUM_THREADS = min(16, os.cpu_count() or 1)
# of JAX that contain Mosaic's library, beside which lies the runtime that it loads
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


class StoredExecutable(msgspec.Struct, frozen=True):
    """One file of a bundle.

    ``workspace_bytes`` is the memory of a call in addition to weights, pages, slots and batch.
    """

    file: str
    size_bytes: int
    sha256: str
    workspace_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """The description of a bundle.

    ``settings`` are the ``EngineConfig`` fields that it decides; ``tuned`` is the result of
    ``tuned_choices`` when it was made.
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
        """The workspace of the largest executable; only one runs at a time."""
        return self.workspace_of(self.executables)

    def workspace_of(self, names: Collection[str]) -> int:
        """The workspace of the largest of these executables."""
        return max(self.executables[name].workspace_bytes for name in names)


@dataclass(frozen=True)
class Bundle:
    """A folder whose files have been checked against its manifest."""

    folder: Path
    manifest: Manifest

    def check_machine(self, placement: Placement) -> None:
        """Raise ``CacheError`` unless it was made for this installation and kind of device."""
        self._refuse(self.manifest.fingerprint.machine, of_machine(placement))

    def check_model(self, model: Model) -> None:
        """Raise ``CacheError`` unless it was made for this model."""
        self._refuse(self.manifest.fingerprint.model, of_model(model))

    def check_program(self, program: Program) -> None:
        """Raise ``CacheError`` unless it was made for these sizes and kernels, with all names."""
        self._refuse(self.manifest.fingerprint.limits, of_limits(program.limits))
        self._refuse(self.manifest.fingerprint.kernels, of_pins(program.pins))
        if missing := set(program.names()) - self.manifest.executables.keys():
            raise _damaged(self.folder, f"its manifest has no {', '.join(sorted(missing))}")

    def load(self, name: str, devices: Sequence[Any]) -> jax.stages.Compiled:
        """Load one executable; raises ``CacheError``, with the file's name, if that fails."""
        return load_executable(self.folder, self.manifest.executables[name], devices)

    def _refuse(self, made_for: Mapping[str, str], here: Mapping[str, str]) -> None:
        if different := differences(made_for, here):
            first, *others = different
            more = f" (also different: {', '.join(others)})" if others else ""
            raise CacheError(
                f"the bundle {self.folder} does not fit: {different[first]}{more}; compile another "
                "one"
            )


def tuned_choices(placement: Placement) -> dict[str, Any]:
    """The tuned kernel configs for this kind of device: by name in ``NAMES``, then by case."""
    kind = placement.device.device_kind
    choices = {name: read_choices(tuned_file(name, kind)) for name in NAMES}
    return {name: found for name, found in choices.items() if found}


def open_bundle(folder: Path) -> Bundle:
    """Read the manifest. Each file's content is checked when it is loaded.

    Raises ``CacheError``, with the file's name, if one is missing, truncated, of another format, or
    may be changed by another user.
    """
    if not folder.is_dir():
        raise CacheError(f"there is no bundle {folder}; make one with `jaxinfer compile`")
    check_tree(folder)
    manifest = read_manifest(folder)
    for stored in manifest.executables.values():
        check_size(folder, stored)
    return Bundle(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle; raises ``CacheError`` if it is unreadable or of another format."""
    path = folder / BUNDLE_MANIFEST
    try:
        content = read_json(path)
        made = msgspec.convert(content, _Format).format
        if made != FORMAT:
            raise CacheError(
                f"the bundle {folder} does not fit: format is {made} in the bundle and {FORMAT} "
                "here; compile another one"
            )
        return msgspec.convert(content, Manifest)
    except OSError as error:
        raise _damaged(folder, f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also msgspec's
        raise _damaged(folder, f"{path} is no manifest: {error}") from error


def load_executable(
    folder: Path,
    stored: StoredExecutable,
    devices: Sequence[Any],  # of jax.Device
) -> jax.stages.Compiled:
    """Load a file of a bundle for these devices, whatever others JAX knows of.

    Raises ``CacheError``, with the file's name, if that fails.
    """
    content = checked_content(folder, stored)
    try:
        return serialize_executable.deserialize_and_load(
            *pickle.loads(content), backend=devices[0].client, execution_devices=devices
        )
    except Exception as error:  # pickle and XLA raise various exceptions for other versions' files
        path = folder / stored.file
        raise _damaged(folder, f"{path}: {type(error).__name__}: {error}") from error


def load_all(
    bundle: Bundle,
    progress: Progress,
    names: Collection[str],
    devices: Sequence[Any],  # of jax.Device
) -> Iterator[tuple[str, jax.stages.Compiled]]:
    """Load executables of a bundle that fits, by name; raises ``CacheError`` if that fails."""
    load_kernel_runtime()
    pool = ThreadPoolExecutor(NUM_THREADS)
    names_of = {pool.submit(bundle.load, name, devices): name for name in names}
    try:
        with progress.task(f"load {len(names)} executables", len(names)) as advance:
            for future in as_completed(names_of):
                yield names_of[future], future.result()
                advance(1)
    finally:  # after a failure or Ctrl-C the other executables are not needed
        pool.shutdown(wait=False, cancel_futures=True)


def executable_file(
    program: Program, name: str, compiled: jax.stages.Compiled
) -> tuple[StoredExecutable, bytes]:
    """One file of a bundle: its record in the manifest, and its content."""
    content = pickle.dumps(serialize_executable.serialize(compiled))
    digest = hashlib.sha256(content).hexdigest()
    workspace = workspace_bytes(compiled) + program.stream_bytes(name, compiled)
    return StoredExecutable(f"{name}.bin", len(content), digest, workspace), content


def write_manifest(
    folder: Path,
    program: Program,
    memory: MemoryPlan,
    executables: Mapping[str, StoredExecutable],
    settings: Mapping[str, Any],
) -> None:
    """Write the manifest, or replace it: it makes a bundle of a folder with these executables.

    ``settings`` are the engine settings that are used when an engine is started with the bundle.
    """
    manifest = Manifest(
        format=FORMAT,
        created_by=f"jaxinfer {VERSION}",
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        fingerprint=Fingerprint.of(program),
        limits=program.limits,
        settings=dict(settings),
        memory=memory,
        tuned=tuned_choices(program.placement),
        executables=dict(executables),
    )
    complete, partial = folder / BUNDLE_MANIFEST, folder / f"{BUNDLE_MANIFEST}.partial"
    write_trusted(partial, msgspec.json.format(msgspec.json.encode(manifest)))
    partial.replace(complete)


def load_kernel_runtime() -> None:
    """Load the libraries that executables call: on a CPU the native kernel, on a GPU Mosaic's.

    Without the latter, an executable with Mosaic kernels does not load in a process that has
    compiled none ("Failed to materialize"). Mosaic's Python module loads it too, but takes 0.4 s.
    """
    if jax.default_backend() == "cpu":
        register()
    if jax.default_backend() == "gpu":
        for plugin in PLUGINS:
            with suppress(ImportError):  # a jax without the library has compiled no such kernel
                library = importlib.import_module(f"{plugin}._mosaic_gpu_ext")
                prepare_mosaic(Path(str(library.__file__)).with_name("libmosaic_gpu_runtime.so"))
                return


def load_kernel_compiler() -> None:
    """Import Mosaic's Python module; call this before any thread compiles.

    The module changes the environment, with which XLA starts ptxas. (2 starts in 16 ended with
    "Failed to launch ptxas", possibly for this reason.)
    """
    if jax.default_backend() == "gpu":
        with suppress(ImportError):  # a jax without the module compiles no such kernel
            importlib.import_module("jax.experimental.mosaic.gpu")


class _Format(msgspec.Struct):
    """The field that manifests of all formats have."""

    format: int


def _damaged(folder: Path, what: str) -> CacheError:
    return CacheError(
        f"the executables in {folder} cannot be used ({what}); delete that folder, then run or "
        "compile again"
    )


def check_size(folder: Path, stored: StoredExecutable) -> None:
    """Raise ``CacheError`` if a file of a bundle is missing, or longer or shorter than it was."""
    path = folder / stored.file
    if not path.is_file():
        raise _damaged(folder, f"{path} is missing")
    if (size := path.stat().st_size) != stored.size_bytes:
        raise _damaged(folder, f"{path} has {size} of {stored.size_bytes} bytes")


def checked_content(folder: Path, stored: StoredExecutable) -> bytes:
    """The content of a file of a bundle; raises ``CacheError`` if it is not as it was written."""
    check_size(folder, stored)
    path = folder / stored.file
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise _damaged(folder, f"{path} is not what its manifest says")
    return content
