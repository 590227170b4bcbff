"""The executables of an engine: loaded from a bundle, which is compiled first if there is none.

The user's cache is a folder of bundles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import CacheError
from jaxinfer.core.host_memory import gc_paused, release_free_heap, release_library_pages
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import OTHER_CACHE, build_once
from jaxinfer.exec.compile.bundle import (
    Bundle,
    Manifest,
    StoredExecutable,
    executable_file,
    load_all,
    load_kernel_compiler,
    open_bundle,
    write_manifest,
)
from jaxinfer.exec.compile.fingerprint import Fingerprint
from jaxinfer.exec.compile.memory_plan import MemoryPlan, check_workspace
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.reuse import take_cached
from pallas_kernels.toolchain.api import Toolchain

MOST_NAMED = 4  # executables in a line of progress

type Compiled = Callable[..., Any]  # jax.stages.Compiled: refuses other shapes and never compiles


class Later(Protocol):
    """Compiles or loads further executables: ``exec.compile.background.Building``."""

    @property
    def compiles(self) -> bool:
        """True if they are compiled for this engine."""
        ...

    @property
    def unfinished(self) -> bool:
        """True if ``take`` may still return executables."""
        ...

    @property
    def has_news(self) -> bool:
        """True if ``take`` returns executables now."""
        ...

    def begin_others(self) -> None:
        """Begin with the other executables: the engine is built, which needs the GIL."""
        ...

    def take(self) -> dict[str, Compiled]:
        """The executables that were loaded since the last call."""
        ...

    def close(self) -> None:
        """Compile and load no further."""
        ...


@dataclass(frozen=True)
class Executables:
    """The executables of an engine."""

    by_name: Mapping[str, Compiled]  # see ``Program.names``
    compiled: int  # number of those of ``by_name`` that were compiled for this engine
    workspace_bytes: int  # the largest workspace: see ``bundle.StoredExecutable``
    later: Later | None = None  # loads those that ``by_name`` does not have yet


def build_executables(
    program: Program,
    *,
    folder: Path,
    memory: MemoryPlan,
    progress: Progress,
    settings: Mapping[str, Any] | None = None,
) -> Executables:
    """Load the executables from the bundle ``folder``; compile and save them first if need be.

    For ``folder`` see ``cached_bundle``. Only loaded executables run: with those that the process
    has compiled itself an engine on an H200 held 3.4 GB of host memory (loaded: 3.0 GB), and the
    launch of a prompt step took 1 ms longer. The bundle's folder is made before anything is
    compiled, so an unwritable cache is an error at once. A second process that needs the same
    bundle waits for the first. The manifest keeps ``settings``. Raises ``ConfigError`` if the
    executables need more workspace than ``memory`` has planned.
    """
    made = _compile_into(folder, program, memory, settings or {}, progress)
    bundle = bundle_for(program, folder)
    check_workspace(memory, bundle.manifest.workspace_bytes)
    executables = load_executables(program, bundle, progress)
    return replace(executables, compiled=len(executables.by_name) if made else 0)


def cached_bundle(program: Program, bundle_root: Path) -> Path:
    """The folder under ``bundle_root`` for a program; it may not exist yet.

    Every source file is read to compute its name.
    """
    return bundle_root / Fingerprint.of(program).digest()


def bundle_for(program: Program, folder: Path) -> Bundle:
    """Open a bundle; raises ``CacheError`` unless it is undamaged and fits the program."""
    bundle = open_bundle(folder)
    bundle.check_machine(program.placement)
    bundle.check_model(program.model)
    bundle.check_program(program)
    return bundle


def load_executables(program: Program, bundle: Bundle, progress: Progress) -> Executables:
    """Load every executable of a program from a bundle that fits."""
    loaded = dict(load_all(bundle, progress, program.names()))
    release_free_heap()  # also memory of the compiler, if this process has compiled
    if program.platform == "cpu":  # before the weights are complete, so 0.1 GB less at the peak
        release_library_pages()
    return Executables(loaded, 0, bundle.manifest.workspace_bytes)


def compile_bundle(
    program: Program,
    folder: Path,
    *,
    memory: MemoryPlan,
    settings: Mapping[str, Any],
    progress: Progress,
    cache: Path | None = None,
) -> tuple[Manifest, bool]:
    """Write a bundle atomically; returns its manifest and whether it was made now.

    Executables that bundles in the folder ``cache`` have are copied; the others are compiled.
    A folder that already holds the same bundle is not changed. A folder with other content is
    refused with ``CacheError``.
    """
    if folder.exists() and not (folder / BUNDLE_MANIFEST).is_file():
        raise CacheError(f"{folder} exists already and is no bundle; choose another folder")
    load_kernel_compiler()
    elsewhere = "choose another folder"
    if _compile_into(folder, program, memory, settings, progress, elsewhere=elsewhere, cache=cache):
        return open_bundle(folder).manifest, True
    try:
        bundle = bundle_for(program, folder)
    except CacheError as error:
        raise CacheError(f"{folder} exists already and is no such bundle: {error}") from None
    load_executables(program, bundle, progress)
    return bundle.manifest, False


def _compile_into(
    folder: Path,
    program: Program,
    memory: MemoryPlan,
    settings: Mapping[str, Any],
    progress: Progress,
    *,
    elsewhere: str = OTHER_CACHE,
    cache: Path | None = None,
) -> bool:
    """Compile and save; returns False if the folder exists already."""

    def fill(partial: Path) -> None:
        taken = take_cached(program, cache, partial, progress) if cache else {}
        names = [name for name in program.names() if name not in taken]
        if taken:
            progress.note(f"take {listed([*taken])} from {cache}")
        made = compile_all(program, names, partial, progress) if names else {}
        found = taken | made
        stored = {name: found[name] for name in program.names() if name in found}
        write_manifest(partial, program, memory, stored, settings)

    return build_once(folder, fill, elsewhere=elsewhere)


def compile_all(
    program: Program,
    names: Sequence[str],
    folder: Path,
    progress: Progress,
    saved: Callable[[str, StoredExecutable], None] = lambda name, stored: None,
) -> dict[str, StoredExecutable]:
    """Compile executables and write them into the folder; returns their records by name.

    ``saved`` is called with each as soon as it is saved; its exceptions end the compilation.

    This thread traces, lowers and saves; a thread per core compiles. Lowering is Python code, and
    several threads are much slower at it than one, as they contend for the interpreter lock; XLA
    does not hold it. Mosaic kernels, which take most of the time, are lowered and compiled by other
    processes at the same time. The step with the last name, the largest with prompts, is traced
    first: its attention kernel and then XLA take longest, one after the other (note 0024). Steps
    with kernels to link are next, as these kernels are compiled when the step is lowered. The
    others follow in reverse order of names, as those that XLA compiles longest have the last names.
    Saving holds the interpreter lock for 0.1 s each, so it begins when all steps are traced, and
    steps that can be lowered are lowered first.
    """
    if not names:
        return {}
    threads = os.cpu_count() or 1
    to_link = [name for name in names if program.links_kernels(name)]
    others = [name for name in reversed(names) if name not in to_link]
    pool = ThreadPoolExecutor(threads)
    try:
        with (
            progress.task(f"compile {listed(names)}", len(names)) as advance,
            gc_paused(),
            Toolchain(threads) as toolchain,
        ):
            steps = _Compilation(program, folder, toolchain, pool, advance)
            if to_link:  # only Mosaic kernels are linked, and only they need worker processes
                toolchain.start_workers()
            for name in (*others[:1], *to_link, *others[1:]):
                steps.trace(name)
            while steps.unfinished:
                steps.proceed()
                if name := steps.save_one():
                    saved(name, steps.stored[name])
                else:
                    wait(steps.pending, return_when=FIRST_COMPLETED)
    finally:  # after a failure or Ctrl-C the other executables are not needed
        pool.shutdown(wait=False, cancel_futures=True)
    return {name: steps.stored[name] for name in names}


type _Kernels = list[Future[Any]]  # kernels that are being compiled


@dataclass
class _Compilation:
    """The state of a compilation: executables by the stage that they have reached.

    A step is lowered when its kernels are compiled, as the lowered step contains their hashes. It
    is compiled when the kernels that it links are compiled.
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
    def unfinished(self) -> bool:
        """True if an executable is not saved yet."""
        return bool(self.traced or self.lowered or self.compiling)

    @property
    def pending(self) -> list[Future[Any]]:
        """The unfinished kernels and compilations for which executables wait."""
        steps = (*self.traced.values(), *self.lowered.values())
        kernels = (kernel for _, made in steps for kernel in made)
        return [each for each in (*kernels, *self.compiling.values()) if not each.done()]

    def trace(self, name: str) -> None:
        """Trace a step and start its kernels. A step without kernels is lowered at once.

        Others are lowered when all steps are traced, since starting kernels is more urgent.
        """
        traced = self.program.trace(name)
        kernels = self.toolchain.begin(traced, link=self.program.links_kernels(name))
        self.traced[name] = traced, kernels
        if not kernels:
            self.proceed()

    def proceed(self) -> None:
        """Lower steps, and start to compile steps, that do not wait for kernels.

        Raises the exception of a kernel that could not be compiled.
        """
        for name in _ready(self.traced):
            traced, links = self.traced.pop(name)[0], self.program.links_kernels(name)
            self.lowered[name] = self.toolchain.lower(traced, link=links)
        for name in _ready(self.lowered):
            lowered, options = self.lowered.pop(name)[0], self.program.compiler_options(name)
            self.compiling[name] = self.pool.submit(lowered.compile, options)

    def save_one(self) -> str | None:
        """Save and release a compiled executable; returns its name, or None if there is none.

        Raises the exception of a step that could not be compiled.
        """
        name = next((name for name, made in self.compiling.items() if made.done()), None)
        if name is None:
            return None
        compiled = self.compiling.pop(name).result()
        self.stored[name], content = executable_file(self.program, name, compiled)
        (self.folder / self.stored[name].file).write_bytes(content)
        self.advance(1)
        return name


def listed(names: Sequence[str]) -> str:
    """The number of executables and the first names, for a line of progress."""
    more = ", ..." if len(names) > MOST_NAMED else ""
    return f"{len(names)} executables ({', '.join(names[:MOST_NAMED])}{more})"


def _ready(steps: Mapping[str, tuple[Any, _Kernels]]) -> list[str]:
    """The names of steps whose kernels are compiled."""
    ready = [name for name, (_, kernels) in steps.items() if all(k.done() for k in kernels)]
    for name in ready:
        for kernel in steps[name][1]:
            kernel.result()
    return ready
