"""Every executable an engine needs, ready before the first request.

Owns: ``Executables`` and the ways to get them: from a bundle, from the user's cache (which is
folders of bundles) or by compiling. Must not know: requests, the scheduler, weights.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxinfer.core.collector import nothing_collected
from jaxinfer.core.config import BUNDLE_MANIFEST
from jaxinfer.core.errors import CacheError
from jaxinfer.core.heap import release_free_heap
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import OTHER_CACHE, build_once
from jaxinfer.exec.aot import (
    Bundle,
    Manifest,
    StoredExecutable,
    executable_file,
    load_bundle,
    open_bundle,
    program_fingerprint,
    write_manifest,
)
from jaxinfer.exec.kernels import KernelsAhead
from jaxinfer.exec.program import Program
from pallas_kernels.triton_text import drop_triton_text

type Compiled = Callable[..., Any]  # jax.stages.Compiled: refuses any other shape, never compiles


@dataclass(frozen=True)
class Executables:
    """The functions of an engine. ``compiled`` says how many were compiled for it."""

    by_name: Mapping[str, Compiled]  # see ``Program.names``
    compiled: int
    workspace_bytes: int  # what the hungriest takes beside its arguments


def build_executables(
    program: Program,
    *,
    bundle_root: Path,
    progress: Progress,
    settings: Mapping[str, Any] | None = None,
) -> Executables:
    """Load every executable from the bundle under ``bundle_root``; where there is none, compile
    and save them all first.

    So what runs is always what was saved. One that was compiled here would lie among what the
    compiler leaves behind: an engine on an H200 held 3.4 GB with such and 3.0 with loaded ones, and
    launching a step of prompts took the host 1 ms less. The bundle's folder is made before anything
    is compiled, so an unwritable cache is known at once; a second process that wants the same
    bundle waits for the first. ``settings`` are those that the bundle's manifest is to keep.
    """
    folder = cached_bundle(program, bundle_root)
    made = _compile_into(folder, program, settings or {}, progress, OTHER_CACHE)
    executables = load_executables(program, bundle_for(program, folder), progress)
    return executables if made is None else replace(executables, compiled=len(made.executables))


def cached_bundle(program: Program, bundle_root: Path) -> Path:
    """The folder under ``bundle_root`` for a program; it may not exist yet."""
    return bundle_root / program_fingerprint(program).digest()


def bundle_for(program: Program, folder: Path) -> Bundle:
    """Open a bundle; raises ``CacheError`` unless it is whole and fits the program."""
    bundle = open_bundle(folder)
    bundle.refuse_machine()
    bundle.refuse_model(program.model)
    bundle.refuse_program(program)
    return bundle


def load_executables(program: Program, bundle: Bundle, progress: Progress) -> Executables:
    """Load the executables of a bundle that fits; those for extras when one is asked for."""
    loaded = load_bundle(bundle, progress, program.names_without_extras())
    release_free_heap()  # the compiler's too, where there was one
    return Executables(loaded, 0, bundle.manifest.workspace_bytes)


def compile_bundle(
    program: Program, folder: Path, *, settings: Mapping[str, Any], progress: Progress
) -> tuple[Manifest, bool]:
    """Write a bundle, whole or not at all; returns its manifest and whether it was made now.

    A folder that holds the same bundle already is left as it is; one that holds anything else is
    refused with ``CacheError``.
    """
    if folder.exists() and not (folder / BUNDLE_MANIFEST).is_file():
        raise CacheError(f"{folder} exists already and is no bundle; choose another folder")
    made = _compile_into(folder, program, settings, progress, "choose another folder")
    if made is not None:
        return made, True
    try:
        bundle = bundle_for(program, folder)
    except CacheError as error:
        raise CacheError(f"{folder} exists already and is no such bundle: {error}") from None
    load_bundle(bundle, progress, program.names())
    return bundle.manifest, False


def _compile_into(
    folder: Path,
    program: Program,
    settings: Mapping[str, Any],
    progress: Progress,
    elsewhere: str,
) -> Manifest | None:
    """Compile and save, unless the folder is there already."""
    made: list[Manifest] = []

    def fill(partial: Path) -> None:
        stored = compile_all(program, partial, progress)
        made.append(write_manifest(partial, program, stored, settings))

    build_once(folder, fill, elsewhere=elsewhere)
    return made[0] if made else None


def compile_all(program: Program, folder: Path, progress: Progress) -> dict[str, StoredExecutable]:
    """Compile every executable and write it into the folder; what was written, by name.

    This thread traces and lowers, others compile. Lowering is Python, and several threads that take
    turns at it are slower than one by far; XLA needs no interpreter. Kernels in Mosaic, which are
    the most of it, are lowered by other processes meanwhile. What takes XLA longest is named last
    and comes first. When all are lowered this thread saves them, as they are done: that keeps
    Python's lock, 0.1 to 0.4 s for each, and before it kept the last from being lowered.
    """
    names = program.names()
    cores = os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores)
    stored: dict[str, StoredExecutable] = {}
    try:
        with progress.task("compile", len(names)) as advance:
            under_way = {}
            with nothing_collected(), KernelsAhead(cores) as kernels:
                steps = _lowered(program, reversed(names), kernels)
                for name, lowered in _held_back(steps, kernels):
                    options = program.compiler_options(name)
                    under_way[pool.submit(lowered.compile, options)] = name
            for done in as_completed(under_way):
                name = under_way.pop(done)  # what is saved is not kept
                stored[name], content = executable_file(name, done.result())
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
        return name, lowered

    for name in names:
        traced = program.trace(name)
        waiting.append((name, traced, kernels.begin(traced.jaxpr)))
        while waiting and all(kernel.done() for kernel in waiting[0][2]):
            yield lower_first()
    while waiting:
        yield lower_first()
