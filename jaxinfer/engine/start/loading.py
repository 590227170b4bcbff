"""What an engine needs in memory: executables, weights, pages and slots, and what of it is made
beside what.

Owns: ``load``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from os.path import isdir
from pathlib import Path
from typing import Any

from jaxinfer.core.heap import release_free_heap
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import prepare_folder
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.build import (
    Executables,
    build_executables,
    cached_bundle,
    load_executables,
)
from jaxinfer.exec.compile.memory_plan import check_workspace
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import (
    claim_memory,
    compile_init_state,
    init_state,
    taking,
)
from jaxinfer.exec.step.slots import SlotState
from jaxinfer.models.base import Params
from jaxinfer.nn import state as layer_state
from jaxinfer.weights.load import load_params

type Timed[T] = tuple[T, float]  # and the seconds that it took
type State = tuple[Params, layer_state.State, SlotState]


def load(
    plan: EnginePlan, program: Program, settings: Mapping[str, Any], progress: Progress
) -> tuple[Timed[Executables], Timed[State]]:
    """Executables beside weights, tokenizer and pages, where all are only to be loaded.

    On a CPU, compiling comes first: the compiler's memory and the weights would add up to twice
    the peak (2.3 instead of 1.3 GB for SmolLM2-135M). A GPU holds its weights itself, but pages
    come last there: XLA tries products in the memory that they take. ``settings`` are those that
    the manifest of what is compiled is to keep. Each comes with the seconds that it took, the state
    with those of its weights.
    """
    loader = _Loader(plan, program, settings, progress)
    if loader.finds_executables:
        progress.note(plan.memory.described())
        return _beside(loader.state, loader.executables)
    plan.read_tokenizer()  # compiling takes a minute: what does not fit is said before
    prepare_folder(loader.folder.parent)  # and that nothing can be saved
    progress.note(plan.memory.described())
    claim_memory(plan.memory, plan.placement.device)
    if program.platform == "cpu":
        return loader.executables(), loader.state()
    made, (params, seconds) = _beside(loader.weights, loader.executables)
    return made, ((params, *init_state(program)), seconds)


@dataclass(frozen=True)
class _Loader:
    """The parts, each for a thread of its own."""

    plan: EnginePlan
    program: Program
    settings: Mapping[str, Any]
    progress: Progress
    _claimed: Future[None] = field(default_factory=Future[None])

    @property
    def finds_executables(self) -> bool:
        """Whether the user gave a bundle, or an engine of this plan has saved one. It is opened by
        who loads it, beside the weights.
        """
        # no directory under an impossible name, which staging tells
        return self.plan.bundle is not None or isdir(self.folder)

    def executables(self) -> Timed[Executables]:
        """Loaded, and compiled and saved before where there is no bundle."""
        start, program, progress = time.perf_counter(), self.program, self.progress
        if self.plan.bundle is not None:
            made = load_executables(program, self.plan.bundle, progress)
            check_workspace(self.plan.memory, made.workspace_bytes)
        else:
            made = build_executables(
                program,
                folder=self.folder,
                memory=self.plan.memory,
                progress=progress,
                settings=self.settings,
            )
        progress.note(self.plan.memory.measured(made.workspace_bytes))
        return made, time.perf_counter() - start

    def weights(self) -> Timed[Params]:
        """Claims the memory of all first."""
        start, plan = time.perf_counter(), self.plan
        try:
            claim_memory(plan.memory, plan.placement.device)
            self._claimed.set_result(None)
        except BaseException as error:
            self._claimed.set_exception(error)  # somebody waits
            raise
        with taking(plan.memory.weight_bytes):
            params = load_params(
                plan.model,
                plan.source,
                placement=plan.placement,
                cache_dir=plan.cache_dir,
                seed=plan.config.seed,
                progress=self.progress,
            )
        release_free_heap()
        return params, time.perf_counter() - start

    def state(self) -> Timed[State]:
        """Weights, pages and slots, with the tokenizer read beside."""
        if self.plan.memory.device is None:  # pages take what weights have left of the host's
            (params, seconds), make = _beside(self._state_maker, self.weights)
            return (params, *make()), seconds
        (params, seconds), pages_and_slots = _beside(self._pages_and_slots, self.weights)
        return (params, *pages_and_slots), seconds

    def _pages_and_slots(self) -> tuple[layer_state.State, SlotState]:
        make = self._state_maker()
        self._claimed.result()  # XLA's own allocator takes 2 s for 130 GB, without Python's lock
        return make()

    def _state_maker(self) -> Callable[[], tuple[layer_state.State, SlotState]]:
        self.plan.read_tokenizer()
        return compile_init_state(self.program)

    @cached_property
    def folder(self) -> Path:
        """Where executables are saved, and found, that the user gave no bundle of."""
        return cached_bundle(self.program, self.plan.cache_dir / "executables")


def _beside[A, B](other: Callable[[], A], main: Callable[[], B]) -> tuple[B, A]:
    """Both results: ``main`` of this thread, while another runs ``other``."""
    pool = ThreadPoolExecutor(1)
    try:
        under_way = pool.submit(other)
        return main(), under_way.result()
    finally:  # after a failure or Ctrl-C, nobody waits for the other
        pool.shutdown(wait=False, cancel_futures=True)
