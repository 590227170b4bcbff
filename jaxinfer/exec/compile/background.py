"""Executables that are compiled or loaded while requests are served with the first ones.

A server on a GPU has some 40 executables. To compile them takes half a minute, and to load them and
run each once takes 1 to 2 s. A few hold every step (``stages.first_names``), so requests are
served once these are loaded. A thread then loads the others, and those that are not saved yet as a
process of low priority compiles them (``process``), and delivers each to the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from jaxinfer.core.host_memory import release_free_heap
from jaxinfer.core.progress import Progress
from jaxinfer.exec.compile.build import (
    Compiled,
    Executables,
    LaterExecutables,
    compile_missing,
    listed,
)
from jaxinfer.exec.compile.bundle import (
    NUM_THREADS,
    Bundle,
    StoredExecutable,
    load_all,
    load_executable,
)
from jaxinfer.exec.compile.memory_plan import check_workspace
from jaxinfer.exec.compile.process import CompilerProcess
from jaxinfer.exec.compile.stages import first_names, in_order_of_use
from jaxinfer.exec.compile.store import Store

LOGGER = "jaxinfer.engine"


def begin_executables(store: Store, bundle: Bundle | None, progress: Progress) -> Executables:
    """The executables of ``stages.first_names``, from a complete bundle or else the store.

    The others are compiled or loaded after ``later.begin``, as that contends with what a start
    still has to do; ``later`` must be closed at the engine's end. Raises what
    ``build_executables`` does.
    """
    building = Building(store, bundle, progress)
    try:
        first = building.first.result()
    except BaseException:  # also Ctrl-C
        building.close()
        raise
    return Executables(first, building.num_compiled, building.workspace_bytes, building)


@dataclass
class Building:
    """A thread that loads executables, and waits for a process that compiles those not saved yet.

    The first ones are compiled by this process, which has nothing else to do. Implements ``Later``.
    """

    store: Store
    bundle: Bundle | None  # the user's, which is complete
    progress: Progress
    first: Future[dict[str, Compiled]] = field(default_factory=Future[dict[str, Compiled]])
    workspace_bytes: int = 0  # the largest so far
    num_compiled: int = 0  # of the first ones, for this engine
    _may_begin: threading.Event = field(default_factory=threading.Event)
    _deliver: Callable[[LaterExecutables], None] | None = None
    _compiler: CompilerProcess | None = None
    _closed: bool = False

    def __post_init__(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="jaxinfer-build", daemon=True)
        self._thread.start()

    def begin(self, deliver: Callable[[LaterExecutables], None]) -> None:
        """See ``Later``."""
        self._deliver = deliver
        self._may_begin.set()

    def close(self) -> None:
        """See ``Later``. Executables that are saved stay so, for the next start."""
        self._closed = True
        self._may_begin.set()
        if (compiler := self._compiler) is not None:
            compiler.close()

    def _run(self) -> None:
        try:
            with self._compiler_of_others() as self._compiler:
                self.first.set_result(self._first())
                self._may_begin.wait()
                if self._deliver is not None:
                    self._load_others(self._deliver)
                    # 1.0 GB of a server of Qwen3-4B on an H200, whose 38 executables take 1.2 GB
                    release_free_heap()
        except Exception as error:
            if not self.first.done():
                self.first.set_exception(error)
            elif not self._closed:
                logging.getLogger(LOGGER).error(
                    "the other executables cannot be %s (%s); requests are served with those that "
                    "are there, more slowly",
                    "loaded" if self._compiler is None else "compiled",
                    error,
                )
        if self._deliver is not None:
            self._deliver(LaterExecutables({}, 0, are_last=True))

    @property
    def _saved(self) -> Bundle | None:
        return self.store.bundle() if self.bundle is None else self.bundle

    @property
    def _devices(self) -> Sequence[object]:  # of jax.Device
        return self.store.program.placement.devices

    def _first(self) -> dict[str, Compiled]:
        """Load the first executables; those that are not saved are compiled before.

        Each is loaded while others of them compile.
        """
        names, saved = first_names(self.store.program), self._saved
        if saved is not None and saved.manifest.executables.keys() >= {*names}:
            self._check(saved.manifest.workspace_of(names))
            return dict(load_all(saved, self.progress, names, self._devices))
        loads: dict[str, Future[Compiled]] = {}
        with ThreadPoolExecutor(NUM_THREADS) as pool:

            def load(name: str, stored: StoredExecutable) -> None:
                self._check(stored.workspace_bytes)
                loads[name] = pool.submit(load_executable, self.store.folder, stored, self._devices)

            self.num_compiled = len(compile_missing(self.store, names, self.progress, load))
            return {name: made.result() for name, made in loads.items()}

    def _compiler_of_others(self) -> AbstractContextManager[CompilerProcess | None]:
        """A process that compiles what is not saved of the other executables, if it is anything.

        It starts now, as it needs some seconds before it compiles; then it waits until this process
        has added the first ones to the store.
        """
        program, saved = self.store.program, self._saved
        found = () if saved is None else saved.manifest.executables
        missing = {*program.names()} - {*first_names(program)} - {*found}
        if not missing:
            return nullcontext()
        return CompilerProcess(self.store, in_order_of_use(program, missing))

    def _load_others(self, deliver: Callable[[LaterExecutables], None]) -> None:
        """Load the other executables that are saved, then each that is compiled."""
        program, saved, compiler = self.store.program, self._saved, self._compiler
        assert saved is not None, "the first ones are saved"
        compiled = () if compiler is None else compiler.names
        skipped = {*first_names(program), *compiled}
        if others := [name for name in program.names() if name not in skipped]:
            self._check(saved.manifest.workspace_of(others))
            for name, loaded in load_all(saved, self.progress, others, self._devices):
                if self._closed:
                    return
                deliver(LaterExecutables({name: loaded}, 0, are_last=False))
        if compiler is None or self._closed:
            return
        words = f"compile {listed(compiled)} beside requests"
        with self.progress.task(words, len(compiled)) as advance:
            for name in compiler.saved():
                stored = self.store.saved()[name]
                self._check(stored.workspace_bytes)
                loaded = load_executable(self.store.folder, stored, self._devices)
                deliver(LaterExecutables({name: loaded}, 1, are_last=False))
                advance(1)

    def _check(self, workspace_bytes: int) -> None:
        """Raise ``ConfigError`` for an executable that needs more workspace than is planned."""
        self.workspace_bytes = max(self.workspace_bytes, workspace_bytes)
        check_workspace(self.store.memory, self.workspace_bytes)
