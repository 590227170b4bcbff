"""Executables that are compiled or loaded while requests are served with the first ones.

A server on a GPU has some 35 executables. To compile them takes half a minute, and to load them and
run each once takes 1 to 2 s. A few hold every step (``Program.first_names``), so requests are
served once these are loaded. A thread compiles the others and writes the bundle, or loads them from
it, and the engine adds each when it is loaded. If the process ends while it compiles, the next
start still finds the first ones.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from shutil import copyfile, rmtree
from typing import Any

from jaxinfer.core.errors import EngineError
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import build_once
from jaxinfer.exec.compile.build import (
    Compiled,
    Executables,
    build_executables,
    bundle_for,
    compile_all,
)
from jaxinfer.exec.compile.bundle import (
    NUM_THREADS,
    Bundle,
    StoredExecutable,
    load_all,
    load_executable,
    write_manifest,
)
from jaxinfer.exec.compile.memory_plan import MemoryPlan, check_workspace
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.reuse import take_cached

LOGGER = "jaxinfer.engine"


def begin_executables(
    program: Program,
    *,
    folder: Path,
    memory: MemoryPlan,
    progress: Progress,
    settings: Mapping[str, Any] | None = None,
) -> Executables:
    """``build_executables`` that returns as soon as ``Program.first_names`` are there.

    Where these are all, it is ``build_executables``. The executables of ``later`` must be added by
    the engine, and ``later`` be closed at its end. They are compiled or loaded after
    ``begin_others``, as that contends for the GIL with what a start still has to do.
    """
    if set(program.first_names) == set(program.names()):
        return build_executables(
            program, folder=folder, memory=memory, progress=progress, settings=settings
        )
    building = Building(program, folder, memory, settings or {}, progress)
    try:
        first = building.first.result()
    except BaseException:  # also Ctrl-C
        building.close()
        raise
    return Executables(first, building.num_compiled, building.workspace_bytes, building)


@dataclass
class Building:
    """A thread that loads the executables of a bundle; if there is none, it compiles them first."""

    program: Program
    folder: Path
    memory: MemoryPlan
    settings: Mapping[str, Any]
    progress: Progress
    first: Future[dict[str, Compiled]] = field(default_factory=Future[dict[str, Compiled]])
    workspace_bytes: int = 0  # the largest so far
    num_compiled: int = 0  # of the first executables; other bundles had the rest of them
    compiles: bool = False  # else the bundle exists
    _may_begin: threading.Event = field(default_factory=threading.Event)
    _loaded: SimpleQueue[tuple[str, Compiled]] = field(default_factory=SimpleQueue)
    _closed: bool = False

    def __post_init__(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="jaxinfer-build", daemon=True)
        self._thread.start()

    @property
    def unfinished(self) -> bool:
        """See ``Later``."""
        return self._thread.is_alive() or not self._loaded.empty()

    @property
    def has_news(self) -> bool:
        """See ``Later``."""
        return not self._loaded.empty()

    def take(self) -> dict[str, Compiled]:
        """See ``Later``."""
        taken: dict[str, Compiled] = {}
        while True:
            try:
                name, loaded = self._loaded.get_nowait()
            except Empty:
                return taken
            taken[name] = loaded

    def begin_others(self) -> None:
        """See ``Later``."""
        self._may_begin.set()

    def close(self) -> None:
        """See ``Later``. What is not saved as a bundle is removed."""
        self._closed = True
        self._may_begin.set()

    def _run(self) -> None:
        try:
            if build_once(self.folder, self._fill):
                rmtree(self._kept, ignore_errors=True)
            else:
                self._load(bundle_for(self.program, self.folder))
        except Exception as error:
            if not self.first.done():
                self.first.set_exception(error)
            elif not self._closed:
                logging.getLogger(LOGGER).error(
                    "the other executables cannot be %s (%s); requests are served with the first "
                    "ones, more slowly",
                    "compiled" if self.compiles else "loaded",
                    error,
                )

    def _load(self, bundle: Bundle) -> None:
        """Load the first executables, then the others."""
        self._check(bundle.manifest.workspace_bytes)
        first = self.program.first_names
        self.first.set_result(dict(load_all(bundle, self.progress, first)))
        others = [name for name in self.program.names() if name not in first]
        self._may_begin.wait()
        for loaded in load_all(bundle, self.progress, others):
            if self._closed:
                return
            self._loaded.put(loaded)

    def _fill(self, folder: Path) -> None:
        """Write the bundle into ``folder``: the first executables, then the others."""
        self.compiles = True
        program, progress = self.program, self.progress
        stored = take_cached(program, self.folder.parent, folder, progress)
        first = [name for name in program.first_names if name not in stored]
        load = partial(load_executable, folder)
        with ThreadPoolExecutor(NUM_THREADS) as pool:  # loads while the longest ones compile
            loads = {name: pool.submit(load, one) for name, one in stored.items()}

            def load_first(name: str, one: StoredExecutable) -> None:
                self._check_saved(name, one)
                loads[name] = pool.submit(load, one)

            stored |= compile_all(program, first, folder, progress, load_first)
            self.num_compiled = len(first)
            self.first.set_result({name: made.result() for name, made in loads.items()})
        self._keep(folder, stored)

        def load_saved(name: str, one: StoredExecutable) -> None:
            self._check_saved(name, one)
            self._loaded.put((name, load(one)))

        others = [name for name in program.names() if name not in stored]
        self._may_begin.wait()
        self._check_open()
        stored |= compile_all(program, others, folder, progress, load_saved)
        write_manifest(folder, program, self.memory, self._in_order(stored), self.settings)

    def _keep(self, folder: Path, stored: Mapping[str, StoredExecutable]) -> None:
        """Keep the first executables for the next start, if this one ends before the bundle."""

        def copy(partial: Path) -> None:
            for one in stored.values():
                copyfile(folder / one.file, partial / one.file)
            write_manifest(partial, self.program, self.memory, self._in_order(stored), {})

        build_once(self._kept, copy)

    @property
    def _kept(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.first")

    def _in_order(self, stored: Mapping[str, StoredExecutable]) -> dict[str, StoredExecutable]:
        return {name: stored[name] for name in self.program.names() if name in stored}

    def _check_saved(self, _: str, stored: StoredExecutable) -> None:
        self._check(stored.workspace_bytes)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was shut down while its executables were compiled")

    def _check(self, workspace_bytes: int) -> None:
        """Raise ``ConfigError`` for an executable that needs more workspace than is planned."""
        self.workspace_bytes = max(self.workspace_bytes, workspace_bytes)
        check_workspace(self.memory, self.workspace_bytes)
