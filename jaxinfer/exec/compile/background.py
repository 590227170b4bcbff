"""Executables that are compiled or loaded while requests are served with the first ones.

A server on a GPU has some 35 executables. To compile them takes half a minute, and to load them and
run each once takes 1 to 2 s. A few hold every step (``Program.first_names``), so requests are
served once these are loaded. A thread then loads the others, and those that are not saved yet as a
process of low priority compiles them (``process``); the engine adds each when it is loaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from jaxinfer.core.progress import Progress
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.build import Compiled, Executables, compile_missing, listed
from jaxinfer.exec.compile.bundle import (
    NUM_THREADS,
    Bundle,
    StoredExecutable,
    load_all,
    load_executable,
)
from jaxinfer.exec.compile.memory_plan import check_workspace
from jaxinfer.exec.compile.process import CompilerProcess
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.store import Store

LOGGER = "jaxinfer.engine"


def begin_executables(store: Store, bundle: Bundle | None, progress: Progress) -> Executables:
    """The executables of ``Program.first_names``, from a complete bundle or else the store.

    The executables of ``later`` must be added by the engine, and ``later`` be closed at its end.
    They are compiled or loaded after ``begin_others``, as that contends with what a start still has
    to do. Raises what ``build_executables`` does.
    """
    building = Building(store, bundle, progress)
    try:
        first = building.first.result()
    except BaseException:  # also Ctrl-C
        building.close()
        raise
    return Executables(first, len(building.compiled), building.workspace_bytes, building)


def in_order_of_use(program: Program, names: Sequence[str]) -> list[str]:
    """The other executables in the order in which requests gain by them.

    Until a bucket is there its steps use a larger one. First those that only decode, the most rows
    first: with 164 rows the step of 512 takes up to twice as long as that of 256. Then prompts, the
    smallest first, which a mixed step of 1,024 tokens replaces; then mixed steps, the most rows
    first.
    """

    def key(bucket: Bucket) -> tuple[bool, bool, int, int]:
        decodes, prefills = bucket.num_decodes, bucket.num_prefill_tokens
        return bucket.taps, bool(prefills), -decodes if not prefills else bool(decodes), prefills

    buckets = sorted(program.limits.buckets, key=key)
    order = [name for bucket in buckets for name in program.names_of(bucket)]
    return sorted(names, key=order.index)


@dataclass
class Building:
    """A thread that loads executables, and waits for a process that compiles those not saved yet.

    The first ones are compiled by this process, which needs nothing else meanwhile.
    """

    store: Store
    bundle: Bundle | None  # the user's, which is complete
    progress: Progress
    first: Future[dict[str, Compiled]] = field(default_factory=Future[dict[str, Compiled]])
    workspace_bytes: int = 0  # the largest so far
    compiled: set[str] = field(default_factory=set[str])  # names, for this engine
    _may_begin: threading.Event = field(default_factory=threading.Event)
    _loaded: SimpleQueue[tuple[str, Compiled]] = field(default_factory=SimpleQueue)
    _compiler: CompilerProcess | None = None
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
        """See ``Later``. Executables that are saved stay so, for the next start."""
        self._closed = True
        self._may_begin.set()
        if (compiler := self._compiler) is not None:
            compiler.close()

    def _run(self) -> None:
        try:
            self.first.set_result(self._first())
            self._may_begin.wait()
            self._load_others()
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
        names, saved = self.store.program.first_names, self._saved
        if saved is not None and saved.manifest.executables.keys() >= {*names}:
            self._check(saved.manifest.workspace_of(names))
            return dict(load_all(saved, self.progress, names, self._devices))
        loads: dict[str, Future[Compiled]] = {}
        before = self.store.saved().keys()
        with ThreadPoolExecutor(NUM_THREADS) as pool:

            def load(name: str, stored: StoredExecutable) -> None:
                self._check(stored.workspace_bytes)
                loads[name] = pool.submit(load_executable, self.store.folder, stored, self._devices)

            compile_missing(self.store, names, self.progress, load)
            self.compiled |= {*names} - before
            return {name: made.result() for name, made in loads.items()}

    def _load_others(self) -> None:
        """Load the other executables that are saved, then each that is compiled."""
        program, saved = self.store.program, self._saved
        assert saved is not None, "the first ones are saved"
        found = saved.manifest.executables.keys() - {*program.first_names}
        others = [name for name in program.names() if name in found]
        if others:
            self._check(saved.manifest.workspace_of(others))
            for loaded in load_all(saved, self.progress, others, self._devices):
                if self._closed:
                    return
                self._loaded.put(loaded)
        missing = {*program.names()} - {*program.first_names} - found
        if missing and not self._closed:
            self._compile(in_order_of_use(program, sorted(missing)))

    def _compile(self, names: Sequence[str]) -> None:
        """Have executables compiled by another process, and load each when it is saved."""
        store, progress = self.store, self.progress
        with (
            progress.task(f"compile {listed(names)} beside requests", len(names)) as advance,
            CompilerProcess(store, names) as self._compiler,
        ):
            if self._closed:  # before the process was there to be closed
                return
            for name in self._compiler.saved():
                stored = store.saved()[name]
                self._check(stored.workspace_bytes)
                self.compiled.add(name)
                self._loaded.put((name, load_executable(store.folder, stored, self._devices)))
                advance(1)

    def _check(self, workspace_bytes: int) -> None:
        """Raise ``ConfigError`` for an executable that needs more workspace than is planned."""
        self.workspace_bytes = max(self.workspace_bytes, workspace_bytes)
        check_workspace(self.store.memory, self.workspace_bytes)
