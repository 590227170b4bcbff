"""The executables of an engine: loaded from a bundle, which is compiled first if need be.

Owns: ``Executables`` and the ways to get them: from a bundle, from the user's cache (which is
folders of bundles) or by compiling. Must not know: requests, the scheduler, weights.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer.core.collector import nothing_collected
from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import CacheError
from jaxinfer.core.heap import release_free_heap
from jaxinfer.core.later import Later
from jaxinfer.core.progress import NoProgress, Progress
from jaxinfer.core.staging import OTHER_CACHE, build_once
from jaxinfer.exec.aot import (
    Bundle,
    Manifest,
    StoredExecutable,
    executable_file,
    load_bundle,
    load_threads,
    open_bundle,
    program_fingerprint,
    write_manifest,
)
from jaxinfer.exec.kernels import KernelsAhead
from jaxinfer.exec.loaded import LoadedExecutables
from jaxinfer.exec.program import Program
from pallas_kernels.triton_text import drop_triton_text

type Compiled = Callable[..., Any]  # jax.stages.Compiled: refuses any other shape, never compiles


@dataclass(frozen=True)
class Executables:
    """The functions of an engine. ``compiled`` says how many were compiled for it."""

    by_name: Mapping[str, Compiled]  # see ``Program.names``
    compiled: int
    workspace_bytes: int  # what the hungriest takes: see ``aot.StoredExecutable``
    # Holds those of ``Program.names_later``, where they are not in the bundle of the others. Begin
    # it when nothing else is to be waited for; until it is done, who asks for one of them waits.
    later: Later[Bundle] | None = None
    # Loads the steps in which rows decode beside prompts, and has them made if need be. Until it is
    # done, who asks for one of them waits.
    mixed: Later[None] | None = None


def build_executables(
    program: Program,
    *,
    folder: Path,
    progress: Progress,
    settings: Mapping[str, Any] | None = None,
    check_workspace: Callable[[int], None] = lambda _: None,
) -> Executables:
    """Load the executables from the bundle ``folder`` (see ``cached_bundle``); where there is none,
    compile and save those of ``Program.names_at_start`` first. The others, in a bundle beside it,
    are ``Executables.later``.

    So what runs is always what was saved. One that was compiled here would lie among what the
    compiler leaves behind: an engine on an H200 held 3.4 GB with such and 3.0 with loaded ones, and
    launching a step of prompts took the host 1 ms less. The bundle's folder is made before anything
    is compiled, so an unwritable cache is known at once; a second process that wants the same
    bundle waits for the first. ``settings`` are those that the bundle's manifest is to keep;
    ``check_workspace`` raises for a workspace, in bytes, that does not fit.
    """
    names = program.names_at_start()
    made = _compile_into(folder, program, names, settings or {}, progress)
    bundle = bundle_for(program, folder, names)
    check_workspace(bundle.manifest.workspace_bytes)
    later = _later(program, folder, settings or {}, check_workspace)
    executables = load_executables(program, bundle, progress, later)
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
    bundle.refuse_machine()
    bundle.refuse_model(program.model)
    bundle.refuse_program(program, names)
    return bundle


def load_executables(
    program: Program, bundle: Bundle, progress: Progress, later: Later[Bundle] | None = None
) -> Executables:
    """Load the executables of a bundle that fits: those that a first token may need. Steps in which
    rows decode beside prompts follow with ``Executables.mixed``, those for extras when one is asked
    for (one holds 30 MB of the host). One that is unusable is an error of who needs it.
    """
    loaded = load_bundle(bundle, progress, program.names_of_first_steps())
    release_free_heap()  # the compiler's too, where there was one

    def load(name: str) -> jax.stages.Compiled:
        if later is None or name in bundle.manifest.executables:
            return bundle.load(name)
        return later.result().load(name)

    mixed = [name for name in program.names_without_extras() if name not in loaded]
    extras = [name for name in program.names() if name not in (*loaded, *mixed)]
    by_name = LoadedExecutables(loaded, (mixed, extras), load, load_threads())
    executables = Executables(by_name, 0, bundle.manifest.workspace_bytes, later)
    if not mixed:
        return executables
    return replace(executables, mixed=Later(partial(by_name.load_group, mixed[0])))


def _later(
    program: Program,
    beside: Path,
    settings: Mapping[str, Any],
    check_workspace: Callable[[int], None],
) -> Later[Bundle] | None:
    """The bundle with the executables of ``Program.names_later``: opened, or made and opened.

    A quarter of the cores compile; the rest is left to the engine, which runs meanwhile.
    """
    names, folder = program.names_later(), beside.with_name(f"{beside.name}-later")
    threads = max(1, (os.cpu_count() or 1) // 4)

    def make() -> Bundle:
        if _compile_into(folder, program, names, settings, NoProgress(), threads=threads):
            release_free_heap()
        bundle = bundle_for(program, folder, names)
        check_workspace(bundle.manifest.workspace_bytes)
        return bundle

    return Later(make) if names else None


def compile_bundle(
    program: Program, folder: Path, *, settings: Mapping[str, Any], progress: Progress
) -> tuple[Manifest, bool]:
    """Write a bundle, whole or not at all; returns its manifest and whether it was made now.

    A folder that holds the same bundle already is left as it is; one that holds anything else is
    refused with ``CacheError``.
    """
    if folder.exists() and not (folder / BUNDLE_MANIFEST).is_file():
        raise CacheError(f"{folder} exists already and is no bundle; choose another folder")
    names = program.names()
    made = _compile_into(
        folder, program, names, settings, progress, elsewhere="choose another folder"
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
    names: Sequence[str],
    settings: Mapping[str, Any],
    progress: Progress,
    *,
    elsewhere: str = OTHER_CACHE,
    threads: int | None = None,
) -> Manifest | None:
    """Compile and save, unless the folder is there already."""
    made: list[Manifest] = []

    def fill(partial: Path) -> None:
        stored = compile_all(program, names, partial, progress, threads)
        made.append(write_manifest(partial, program, stored, settings))

    build_once(folder, fill, elsewhere=elsewhere)
    return made[0] if made else None


def compile_all(
    program: Program,
    names: Sequence[str],
    folder: Path,
    progress: Progress,
    threads: int | None = None,
) -> dict[str, StoredExecutable]:
    """Compile executables and write them into the folder; what was written, by name.

    This thread traces and lowers, others compile: as many as there are cores, or ``threads``.
    Lowering is Python, and several threads that take turns at it are slower than one by far; XLA
    needs no interpreter. Kernels in Mosaic, which are the most of it, are lowered by other
    processes meanwhile. Steps with kernels to link come first, as these are compiled once more when
    the step is lowered; then what takes XLA longest, which is named last. When all are lowered
    this thread saves them, as they are done: that keeps Python's lock, 0.1 to 0.4 s for each, and
    before it kept the last from being lowered.
    """
    threads = threads or os.cpu_count() or 1
    pool = ThreadPoolExecutor(threads)
    stored: dict[str, StoredExecutable] = {}
    try:
        with progress.task("compile", len(names)) as advance:
            under_way: dict[Future[jax.stages.Compiled], str] = {}
            with nothing_collected(), KernelsAhead(threads) as kernels:
                to_link = [name for name in names if program.links_kernels(name)]
                if to_link:  # kernels in Mosaic alone are
                    kernels.expect_mosaic()
                others = [name for name in reversed(names) if name not in to_link]
                steps = _lowered(program, (*to_link, *others), kernels)
                for name, lowered in _held_back(steps, kernels):
                    options = program.compiler_options(name)
                    under_way[pool.submit(lowered.compile, options)] = name
            for done in as_completed(under_way):
                name = under_way.pop(done)  # what is saved is not kept
                stored[name], content = executable_file(program, name, done.result())
                (folder / stored[name].file).write_bytes(content)
                advance(1)
    finally:  # after a failure or Ctrl-C, nobody needs what is still compiling
        pool.shutdown(wait=False, cancel_futures=True)
    return {name: stored[name] for name in names}


def _held_back(
    steps: Iterator[tuple[str, jax.stages.Lowered]], kernels: KernelsAhead
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The same, but none while a kernel is compiled.

    Mosaic and XLA give LLVM different options, which are the process's: one waits until the other
    has nothing to compile. Beside 16 threads with steps a kernel waited for 13 s.
    """
    held: list[tuple[str, jax.stages.Lowered]] = []
    for step in steps:
        held.append(step)
        if kernels.done:
            yield from held
            held.clear()
    kernels.wait()
    yield from held


def _lowered(
    program: Program, names: Iterable[str], kernels: KernelsAhead
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The executables, lowered in order; meanwhile the kernels of the next are compiled."""
    waiting: deque[tuple[str, jax.stages.Traced, list[Future[Any]]]] = deque()

    def lower_first() -> tuple[str, jax.stages.Lowered]:
        name, traced, wanted = waiting.popleft()
        for kernel in wanted:
            kernel.result()
        lowered = traced.lower()
        drop_triton_text(lowered.compiler_ir())
        if program.links_kernels(name):
            kernels.link(traced.jaxpr, lowered.compiler_ir())
        return name, lowered

    for name in names:
        traced = program.trace(name)
        wanted = kernels.begin(traced.jaxpr, to_link=program.links_kernels(name))
        waiting.append((name, traced, wanted))
        while waiting and all(kernel.done() for kernel in waiting[0][2]):
            yield lower_first()
    while waiting:
        yield lower_first()
