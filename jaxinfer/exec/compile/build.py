"""The executables of an engine: loaded from a bundle, which is compiled first if need be.

Owns: ``Executables`` and the ways to get them: from a bundle, from the user's cache (which is
folders of bundles) or by compiling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import CacheError
from jaxinfer.core.host_memory import gc_paused, release_free_heap
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import OTHER_CACHE, build_once
from jaxinfer.exec.compile.bundle import (
    Bundle,
    Manifest,
    StoredExecutable,
    executable_file,
    load_bundle,
    open_bundle,
    program_fingerprint,
    write_manifest,
)
from jaxinfer.exec.compile.memory_plan import MemoryPlan, check_workspace
from jaxinfer.exec.compile.program import Program
from pallas_kernels.toolchain.api import Toolchain

type Compiled = Callable[..., Any]  # jax.stages.Compiled: refuses any other shape, never compiles


@dataclass(frozen=True)
class Executables:
    """The functions of an engine. ``compiled`` says how many were compiled for it."""

    by_name: Mapping[str, Compiled]  # see ``Program.names``
    compiled: int
    workspace_bytes: int  # of the largest: see ``bundle.StoredExecutable``


def build_executables(
    program: Program,
    *,
    folder: Path,
    memory: MemoryPlan,
    progress: Progress,
    settings: Mapping[str, Any] | None = None,
) -> Executables:
    """Load the executables from the bundle ``folder`` (see ``cached_bundle``); where there is none,
    compile and save them first.

    So what runs is always what was saved. One that was compiled here would lie among what the
    compiler leaves behind: an engine on an H200 held 3.4 GB with such and 3.0 with loaded ones, and
    launching a step of prompts took the host 1 ms less. The bundle's folder is made before anything
    is compiled, so an unwritable cache is known at once; a second process that wants the same
    bundle waits for the first. ``settings`` are those that the bundle's manifest keeps, and
    ``memory`` is the plan that the executables are checked against: ``ConfigError``.
    """
    names = program.names()
    made = _compile_into(folder, program, memory, names, settings or {}, progress)
    bundle = bundle_for(program, folder, names)
    check_workspace(memory, bundle.manifest.workspace_bytes)
    executables = load_executables(program, bundle, progress)
    return executables if made is None else replace(executables, compiled=len(made.executables))


def cached_bundle(program: Program, bundle_root: Path) -> Path:
    """The folder under ``bundle_root`` for a program; it may not exist yet. Every source file is
    read for its name.
    """
    return bundle_root / program_fingerprint(program).digest()


def bundle_for(program: Program, folder: Path, names: Collection[str]) -> Bundle:
    """Open a bundle; raises ``CacheError`` unless it is whole, fits the program and has these
    executables.
    """
    bundle = open_bundle(folder)
    bundle.refuse_machine(program.placement)
    bundle.refuse_model(program.model)
    bundle.refuse_program(program, names)
    return bundle


def load_executables(program: Program, bundle: Bundle, progress: Progress) -> Executables:
    """Load every executable of a program from a bundle that fits."""
    loaded = load_bundle(bundle, progress, program.names())
    release_free_heap()  # the compiler's too, where there was one
    return Executables(loaded, 0, bundle.manifest.workspace_bytes)


def compile_bundle(
    program: Program,
    folder: Path,
    *,
    memory: MemoryPlan,
    settings: Mapping[str, Any],
    progress: Progress,
) -> tuple[Manifest, bool]:
    """Write a bundle, whole or not at all; returns its manifest and whether it was made now.

    A folder that holds the same bundle already is left as it is; one that holds anything else is
    refused with ``CacheError``.
    """
    if folder.exists() and not (folder / BUNDLE_MANIFEST).is_file():
        raise CacheError(f"{folder} exists already and is no bundle; choose another folder")
    names = program.names()
    made = _compile_into(
        folder, program, memory, names, settings, progress, elsewhere="choose another folder"
    )
    if made is not None:
        return made, True
    try:
        bundle = bundle_for(program, folder, names)
    except CacheError as error:
        raise CacheError(f"{folder} exists already and is no such bundle: {error}") from None
    load_bundle(bundle, progress, names)
    return bundle.manifest, False


def _compile_into(
    folder: Path,
    program: Program,
    memory: MemoryPlan,
    names: Sequence[str],
    settings: Mapping[str, Any],
    progress: Progress,
    *,
    elsewhere: str = OTHER_CACHE,
) -> Manifest | None:
    """Compile and save, unless the folder is there already."""
    made: list[Manifest] = []

    def fill(partial: Path) -> None:
        stored = compile_all(program, names, partial, progress)
        made.append(write_manifest(partial, program, memory, stored, settings))

    build_once(folder, fill, elsewhere=elsewhere)
    return made[0] if made else None


def compile_all(
    program: Program,
    names: Sequence[str],
    folder: Path,
    progress: Progress,
) -> dict[str, StoredExecutable]:
    """Compile executables and write them into the folder; what was written, by name.

    This thread traces, lowers and saves, others compile: as many as there are cores. Lowering is
    Python, and several threads that take turns at it are slower than one by far; XLA needs no
    interpreter. Kernels in Mosaic, which are the most of it, are lowered and compiled by other
    processes at the same time. Steps with kernels to link come first, as these are compiled when
    the step is lowered; then what takes XLA longest, which is named last. Saving keeps Python's
    lock, 0.1 s for each: it begins when all is traced, and waits for what can be lowered.
    """
    threads = os.cpu_count() or 1
    to_link = [name for name in names if program.links_kernels(name)]
    others = [name for name in reversed(names) if name not in to_link]
    pool = ThreadPoolExecutor(threads)
    try:
        with (
            progress.task("compile", len(names)) as advance,
            gc_paused(),
            Toolchain(threads) as toolchain,
        ):
            steps = _Steps(program, folder, toolchain, pool, advance)
            if to_link:  # kernels in Mosaic alone are
                toolchain.start_workers()
            for name in (*to_link, *others):
                steps.trace(name)
            while steps.left:
                steps.move_on()
                if not steps.save_one():
                    wait(steps.under_way, return_when=FIRST_COMPLETED)
    finally:  # after a failure or Ctrl-C, nobody needs what is still compiling
        pool.shutdown(wait=False, cancel_futures=True)
    return {name: steps.stored[name] for name in names}


type _Kernels = list[Future[Any]]  # that are being made


@dataclass
class _Steps:
    """Steps on their way to the folder, each by what it waits for.

    A step is lowered once its kernels are compiled, since it names them by their hashes then, and
    compiled once those are that it links.
    """

    program: Program
    folder: Path
    toolchain: Toolchain
    pool: ThreadPoolExecutor
    advance: Callable[[int], None]
    traced: dict[str, tuple[jax.stages.Traced, _Kernels]] = field(default_factory=dict)
    lowered: dict[str, tuple[jax.stages.Lowered, _Kernels]] = field(default_factory=dict)
    compiling: dict[str, Future[jax.stages.Compiled]] = field(default_factory=dict)
    stored: dict[str, StoredExecutable] = field(default_factory=dict)

    @property
    def left(self) -> bool:
        """Whether any is not saved yet."""
        return bool(self.traced or self.lowered or self.compiling)

    @property
    def under_way(self) -> list[Future[Any]]:
        """What any of them waits for."""
        steps = (*self.traced.values(), *self.lowered.values())
        kernels = (kernel for _, made in steps for kernel in made)
        return [each for each in (*kernels, *self.compiling.values()) if not each.done()]

    def trace(self, name: str) -> None:
        """Trace a step, and begin its kernels. One that has none is compiled meanwhile; others wait
        until all are traced, as to begin kernels is more urgent than to lower what calls them.
        """
        traced = self.program.trace(name)
        wanted = self.toolchain.begin(traced, link=self.program.links_kernels(name))
        self.traced[name] = traced, wanted
        if not wanted:
            self.move_on()

    def move_on(self) -> None:
        """Lower and begin to compile what waits for nothing; raises what a kernel raised."""
        for name in _ready(self.traced):
            self._lower(name, self.traced.pop(name)[0])
        for name in _ready(self.lowered):
            lowered, options = self.lowered.pop(name)[0], self.program.compiler_options(name)
            self.compiling[name] = self.pool.submit(lowered.compile, options)

    def save_one(self) -> bool:
        """Save an executable that is compiled, if there is one, and let go of it; raises what the
        compiler raised.
        """
        name = next((name for name, made in self.compiling.items() if made.done()), None)
        if name is None:
            return False
        compiled = self.compiling.pop(name).result()
        self.stored[name], content = executable_file(self.program, name, compiled)
        (self.folder / self.stored[name].file).write_bytes(content)
        self.advance(1)
        return True

    def _lower(self, name: str, traced: jax.stages.Traced) -> None:
        links = self.program.links_kernels(name)
        self.lowered[name] = self.toolchain.lower(traced, link=links)


def _ready(steps: Mapping[str, tuple[Any, _Kernels]]) -> list[str]:
    """Those whose kernels are made."""
    ready = [name for name, (_, kernels) in steps.items() if all(k.done() for k in kernels)]
    for name in ready:
        for kernel in steps[name][1]:
            kernel.result()
    return ready
