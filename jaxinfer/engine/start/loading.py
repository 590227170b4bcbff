"""Loads executables and weights and creates pages and slots, at the same time where possible."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jaxinfer.core.host_memory import release_free_heap
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import prepare_folder
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.background import begin_executables
from jaxinfer.exec.compile.build import Executables, build_executables, load_executables
from jaxinfer.exec.compile.bundle import load_kernel_compiler
from jaxinfer.exec.compile.stages import first_names
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import (
    allocating,
    check_host,
    claim_memory,
    compile_init_state,
    init_state,
)
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.models.base import Params
from jaxinfer.nn import state as layer_state
from jaxinfer.weights.uses import note_use

type Timed[T] = tuple[T, float]  # and the seconds that it took
type State = tuple[Params, layer_state.State, SlotState]


class Loaded(NamedTuple):
    """The parts that ``load`` makes of a plan."""

    executables: Timed[Executables]
    state: Timed[State]
    tokenizer_read: Future[None]  # its exception is that of ``EnginePlan.tokenizer``


def load(plan: EnginePlan, progress: Progress, serves_early: bool = False) -> Loaded:
    """Return the executables and the state, each with the seconds of its loading or compiling.

    ``serves_early``: see ``build_engine``.

    If nothing has to be compiled, executables load while weights and pages do, and the tokenizer is
    read, which may go on when the others are there. Else, on a CPU, compiling comes first: the
    compiler's memory and the weights together would nearly double the peak (2.3 GB instead of 1.3
    GB for SmolLM2-135M). On a GPU weights load while the steps compile, but pages come last: XLA
    runs GEMMs in their memory to autotune them. The seconds of the state are those of its weights.
    """
    check_host(plan.memory)
    read = Future[None]()
    loader = _Loader(plan, progress, serves_early, read)
    if plan.bundle is None:
        note_use(plan.cache_dir, plan.source.files, loader.store.folder)
    if loader.finds_executables:
        progress.detail(plan.memory.described())
        return Loaded(*_beside(loader.state, loader.executables), read)
    load_kernel_compiler()
    _ = plan.facts  # errors of the tokenizer are reported before compiling, which takes a minute
    read.set_result(None)
    store = loader.store
    prepare_folder(store.folder.parent, store.cache)  # an error if nothing can be saved
    progress.detail(plan.memory.described())
    for device in plan.program.placement.own_devices:
        claim_memory(plan.memory, device)
    if plan.program.platform == "cpu":
        return Loaded(loader.executables(), loader.state(), read)
    made, (params, seconds) = _beside(loader.weights, loader.executables)
    return Loaded(made, ((params, *init_state(plan.program)), seconds), read)


@dataclass(frozen=True)
class _Loader:
    """The tasks of ``load``, for threads."""

    plan: EnginePlan
    progress: Progress
    serves_early: bool
    tokenizer_read: Future[None]
    _claimed: Future[None] = field(default_factory=Future[None])

    @cached_property
    def store(self) -> Store:
        """The executables in the cache."""
        return self.plan.store

    @property
    def _needed(self) -> Sequence[str]:
        """The names of the executables that must be there before requests are served."""
        program = self.plan.program
        return first_names(program) if self.serves_early else program.names()

    @property
    def finds_executables(self) -> bool:
        """True if the user gave a bundle, or engines of this program have saved what is needed.

        ``executables`` opens it, while weights load.
        """
        return self.plan.bundle is not None or self.store.saved().keys() >= {*self._needed}

    def executables(self) -> Timed[Executables]:
        """Load the executables; those that are not saved are compiled before."""
        start, plan = time.perf_counter(), self.plan
        if self.serves_early and {*self._needed} != {*plan.program.names()}:
            made = begin_executables(self.store, plan.bundle, self.progress)
        elif plan.bundle is not None:
            made = load_executables(plan.program, plan.bundle, plan.memory, self.progress)
        else:
            made = build_executables(self.store, self.progress)
        self.progress.detail(plan.memory.measured(made.workspace_bytes))
        return made, time.perf_counter() - start

    def weights(self) -> Timed[Params]:
        """Claim the memory of the whole plan, then load the weights."""
        start, plan = time.perf_counter(), self.plan
        try:
            for device in plan.program.placement.own_devices:
                claim_memory(plan.memory, device)
            self._claimed.set_result(None)
        except BaseException as error:
            self._claimed.set_exception(error)  # ``_pages_and_slots`` waits for it
            raise
        with allocating(plan.memory.weight_bytes):
            params = plan.load_params(self.progress)
        release_free_heap()
        return params, time.perf_counter() - start

    def state(self) -> Timed[State]:
        """Load weights, create pages and slots, and begin to read the tokenizer."""
        if self.plan.memory.device is None:  # pages reuse host memory that loading weights frees
            (params, seconds), make = _beside(self._state_maker, self.weights)
            return (params, *make()), seconds
        (params, seconds), pages_and_slots = _beside(self._pages_and_slots, self.weights)
        return (params, *pages_and_slots), seconds

    def _pages_and_slots(self) -> tuple[layer_state.State, SlotState]:
        make = compile_init_state(self.plan.program)
        self._claimed.result()  # XLA's default allocator takes 2 s for 130 GB, without the GIL
        made = make()
        self._begin_tokenizer()
        return made

    def _state_maker(self) -> Callable[[], tuple[layer_state.State, SlotState]]:
        make = compile_init_state(self.plan.program)
        self._begin_tokenizer()
        return make

    def _begin_tokenizer(self) -> None:
        """Read it in a thread, when executables and weights load in others.

        It holds the GIL for up to 0.5 s, in which no other load would begin; steps can run for the
        first time beside it.
        """
        if not self.tokenizer_read.done():
            threading.Thread(target=self._read_tokenizer, daemon=True).start()

    def _read_tokenizer(self) -> None:
        try:
            _ = self.plan.tokenizer
            self.tokenizer_read.set_result(None)
        except BaseException as error:
            self.tokenizer_read.set_exception(error)


def _beside[A, B](other: Callable[[], A], main: Callable[[], B]) -> tuple[B, A]:
    """Run ``main`` on this thread and ``other`` on another; returns both results, main's first."""
    pool = ThreadPoolExecutor(1)
    try:
        under_way = pool.submit(other)
        return main(), under_way.result()
    finally:  # after a failure or Ctrl-C, do not wait for the other
        pool.shutdown(wait=False, cancel_futures=True)
