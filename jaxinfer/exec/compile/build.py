"""The executables of an engine: compiled unless the cache has them, and loaded from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import CacheError
from jaxinfer.core.host_cpu import usable_cores
from jaxinfer.core.host_memory import gc_paused, release_free_heap, release_library_pages
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import TRUSTED_FOLDER, build_once, write_trusted
from jaxinfer.exec.compile.bundle import (
    Bundle,
    Manifest,
    StoredExecutable,
    checked_content,
    executable_file,
    load_all,
    load_kernel_compiler,
    open_bundle,
    write_manifest,
)
from jaxinfer.exec.compile.memory_plan import MemoryPlan, check_workspace
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.store import Store
from pallas_kernels.toolchain.api import Toolchain

MOST_NAMED = 4  # executables in a line of progress
# Kernels and steps for each core that are compiled or wait for it, beyond which no further step is
# traced if each executable is to be saved soon: the kernels of a step would queue behind all others
BACKLOG = 2

type Compiled = Callable[..., Any]  # jax.stages.Compiled: refuses other shapes and never compiles


class LaterExecutables(NamedTuple):
    """Executables that were compiled or loaded while an engine serves requests."""

    by_name: Mapping[str, Compiled]
    num_compiled: int  # of these, for this engine
    are_last: bool  # no others follow


class Later(Protocol):
    """Compiles or loads further executables: ``exec.compile.background.Building``."""

    def begin(self, deliver: Callable[[LaterExecutables], None]) -> None:
        """Begin, now that the engine is built, which needs the GIL.

        ``deliver`` is called on another thread, and at last once more with ``are_last``, also after
        a failure, which is logged.
        """
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


def build_executables(store: Store, progress: Progress) -> Executables:
    """Load the executables of a program from the cache; those that are missing are compiled first.

    Only loaded executables run: with those that the process has compiled itself an engine on an
    H200 held 3.4 GB of host memory (loaded: 3.0 GB), and the launch of a prompt step took 1 ms
    longer. A second process that needs the same executables waits for the first. Raises
    ``ConfigError`` if they need more workspace than is planned, ``CacheError`` if the cache cannot
    be written or is damaged.
    """
    compiled = len(compile_missing(store, store.program.names(), progress))
    bundle = store.bundle()
    assert bundle is not None, "a program has executables"
    return replace(
        load_executables(store.program, bundle, store.memory, progress), compiled=compiled
    )


def load_executables(
    program: Program, bundle: Bundle, memory: MemoryPlan, progress: Progress
) -> Executables:
    """Load every executable of a program from a bundle that has them all.

    Raises ``ConfigError`` if they need more workspace than ``memory`` has planned.
    """
    names = program.names()
    workspace = bundle.manifest.workspace_of(names)
    check_workspace(memory, workspace)
    loaded = dict(load_all(bundle, progress, names, program.placement.devices))
    release_free_heap()  # also memory of the compiler, if this process has compiled
    if program.platform == "cpu":  # before the weights are complete, so 0.1 GB less at the peak
        release_library_pages()
    return Executables(loaded, 0, workspace)


def compile_missing(
    store: Store,
    names: Sequence[str],
    progress: Progress,
    saved: Callable[[str, StoredExecutable], None] = lambda name, stored: None,
    *,
    as_they_come: bool = False,
) -> list[str]:
    """Compile those of the executables that the store does not have; returns their names.

    ``saved`` is called for each of ``names`` as soon as it is in the store. Nothing is locked if
    all are. ``as_they_come``: see ``compile_all``.
    """
    found = store.saved()
    with nullcontext() if found.keys() >= {*names} else store.adding():
        found = store.saved()  # also of another process, for which this one has waited
        for name in names:
            if name in found:
                saved(name, found[name])
        missing = [name for name in names if name not in found]

        def add(name: str, stored: StoredExecutable) -> None:
            store.add(name, stored)
            saved(name, stored)

        if missing:
            folder, program = store.folder, store.program
            compile_all(program, missing, folder, progress, add, as_they_come=as_they_come)
        return missing


def compile_bundle(
    store: Store,
    folder: Path,
    *,
    settings: Mapping[str, Any],
    progress: Progress,
) -> tuple[Manifest, bool]:
    """Write a bundle of a program atomically; returns its manifest and whether it was made now.

    Executables that the store has are copied; the others are compiled. A folder that already holds
    the same bundle is not changed. A folder with other content is refused with ``CacheError``.
    """
    program, memory = store.program, store.memory
    if folder.exists() and not (folder / BUNDLE_MANIFEST).is_file():
        raise CacheError(f"{folder} exists already and is no bundle; choose another folder")
    load_kernel_compiler()

    def fill(partial: Path) -> None:
        found = _copied(store, partial, progress)
        missing = [name for name in program.names() if name not in found]
        if found:
            progress.note(f"take {listed([*found])} from {store.folder}")
        if missing:
            found |= compile_all(program, missing, partial, progress)
        stored = {name: found[name] for name in program.names() if name in found}
        write_manifest(partial, program, memory, stored, settings)

    if build_once(folder, fill, elsewhere="choose another folder", mode=TRUSTED_FOLDER):
        return open_bundle(folder).manifest, True
    try:
        bundle = bundle_for(program, folder)
    except CacheError as error:
        raise CacheError(f"{folder} exists already and is no such bundle: {error}") from None
    load_executables(program, bundle, memory, progress)
    return bundle.manifest, False


def bundle_for(program: Program, folder: Path) -> Bundle:
    """Open a bundle; raises ``CacheError`` unless it is undamaged and fits the program."""
    bundle = open_bundle(folder)
    bundle.check_machine(program.placement)
    bundle.check_model(program.model)
    bundle.check_program(program)
    return bundle


def _copied(store: Store, folder: Path, progress: Progress) -> dict[str, StoredExecutable]:
    """Copy the executables of a store into a folder; a damaged one is left out, and named."""
    try:
        found, copied = store.saved(), dict[str, StoredExecutable]()
    except CacheError as error:
        progress.note(f"not taken from the cache: {error}")
        return {}
    for name, stored in found.items():
        try:
            content = checked_content(store.folder, stored)
        except CacheError as error:
            progress.note(f"not taken from the cache: {error}")
            continue
        write_trusted(folder / stored.file, content)
        copied[name] = stored
    return copied


def compile_all(
    program: Program,
    names: Sequence[str],
    folder: Path,
    progress: Progress,
    saved: Callable[[str, StoredExecutable], None] = lambda name, stored: None,
    *,
    as_they_come: bool = False,
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

    ``as_they_come``: trace in the order of ``names``, a few steps ahead of the compilers, so that
    the first executables are saved long before the last ones.
    """
    threads = usable_cores()
    to_link = [name for name in names if program.links_kernels(name)]
    others = [name for name in reversed(names) if name not in to_link]
    order = names if as_they_come else (*others[:1], *to_link, *others[1:])
    pool = ThreadPoolExecutor(threads)
    try:
        with (
            progress.task(f"compile {listed(names)}", len(names)) as report,
            gc_paused(),
            program.placement.as_default(),
            Toolchain(threads) as toolchain,
        ):
            steps = _Compilation(program, folder, toolchain, pool, report, saved)
            if to_link:  # only Mosaic kernels are linked, and only they need worker processes
                toolchain.start_workers()
            for name in order:
                steps.trace(name)
                while as_they_come and len(steps.pending) > BACKLOG * threads:
                    steps.advance_or_wait()
            while steps.unfinished:
                steps.advance_or_wait()
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
    report: Callable[[int], None]
    saved: Callable[[str, StoredExecutable], None]
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

    def advance_or_wait(self) -> None:
        """Lower, compile and save what does not wait for anything; if nothing is saved, wait."""
        self.proceed()
        if not self.save_one():
            wait(self.pending, return_when=FIRST_COMPLETED)

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

    def save_one(self) -> bool:
        """Save and release a compiled executable; False if there is none.

        Raises the exception of a step that could not be compiled.
        """
        name = next((name for name, made in self.compiling.items() if made.done()), None)
        if name is None:
            return False
        compiled = self.compiling.pop(name).result()
        self.stored[name], content = executable_file(self.program, name, compiled)
        write_trusted(self.folder / self.stored[name].file, content)
        self.saved(name, self.stored[name])
        self.report(1)
        return True


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
