"""Executables compiled by a process beside the engine: its job, its answers and its end."""

from __future__ import annotations

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from jaxinfer.core.errors import EngineError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.exec.compile.build import build_executables
from jaxinfer.exec.compile.memory_plan import program_memory
from jaxinfer.exec.compile.process import CompilerProcess, Job, compiler_cores
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.stages import in_order_of_use
from jaxinfer.exec.compile.store import Store
from kit.engines import tiny_limits
from kit.tiny_models import NAMES, tiny_model


def store_of(root: Path, family: str = "llama") -> Store:
    model = tiny_model(family)[0]
    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16, groups=model.state.groups)
    snapshots = int(model.state.bytes_per_slot > 0)
    limits = replace(limits, align=model.state.align, num_snapshots=snapshots)
    program = Program(model, limits, platform="cpu")
    return Store.of(program, program_memory(program, None), root)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return store_of(tmp_path)


def test_it_saves_executables_in_order_that_the_caller_can_load(store: Store) -> None:
    names = ["d2", "extras1"]
    with CompilerProcess(store, names) as compiler:
        saved = []
        for name in compiler.saved():
            saved.append(name)
            assert {*store.saved()} >= {*saved}
        assert os.getpriority(os.PRIO_PROCESS, compiler.pid) == 19
    assert sorted(saved) == sorted(names)
    executables = build_executables(store, NO_PROGRESS)
    assert executables.compiled == len(store.program.names()) - len(names)
    assert executables.by_name.keys() == {*store.program.names()}


def test_its_failure_is_an_error(store: Store) -> None:
    with (
        CompilerProcess(store, ["d3"]) as compiler,
        pytest.raises(EngineError, match="KeyError: 'd3'|d3"),
    ):
        list(compiler.saved())


def test_its_death_is_an_error(store: Store) -> None:
    with CompilerProcess(store, ["d2"]) as compiler:
        os.kill(compiler.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="was killed by SIGKILL; see whether the host"):
            list(compiler.saved())


def test_it_ends_with_its_caller(store: Store) -> None:
    compiler = CompilerProcess(store, ["d2"])
    compiler.hang_up()  # as the system does when a process ends
    deadline = time.monotonic() + 30
    while compiler.alive:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("family", NAMES)
def test_a_job_of_each_family_is_of_the_same_executables(family: str, tmp_path: Path) -> None:
    store = store_of(tmp_path, family)
    job: Job = pickle.loads(pickle.dumps(Job.of(store, ["d2"])))
    assert Store.of(job.store().program, job.memory, tmp_path).folder == store.folder


@pytest.mark.parametrize(
    ("cores", "used"), [(1, 1), (2, 1), (4, 3), (8, 6), (16, 12), (32, 28), (128, 124)]
)
def test_some_cores_are_left_to_requests(cores: int, used: int) -> None:
    assert compiler_cores(cores) == used


def test_small_steps_are_compiled_first(store: Store) -> None:
    names = ["d1", "d2", "p16x1", "d2p16x1"]
    assert {*names} < {*store.program.names()}
    assert in_order_of_use(store.program, names[::-1]) == names
