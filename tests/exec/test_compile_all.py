"""From a program to compiled executables and their files."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.exec.compile import build as exec_compile
from jaxinfer.exec.compile.program import Program
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model
from pallas_kernels.toolchain import api as toolchain

PROGRAM = Program(
    tiny_model("llama")[0], tiny_limits(max_num_seqs=1, max_num_batched_tokens=16), platform="cpu"
)


def steps_with(kernels: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every step contain these kernels."""
    monkeypatch.setattr(toolchain, "kernels_in", lambda _: kernels)


def test_kernels_are_compiled_once_in_other_threads_and_before_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, bool]] = []
    here = threading.current_thread()

    def event(what: str) -> None:
        events.append((what, threading.current_thread() is here))

    def lower(self: jax.stages.Traced) -> jax.stages.Lowered:
        event("step")
        assert not gc.isenabled()
        return lowered(self)

    lowered = jax.stages.Traced.lower
    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    steps_with({name: lambda n=name: event(n) for name in ("norm", "draw")}, monkeypatch)
    stored = exec_compile.compile_all(PROGRAM, PROGRAM.names(), tmp_path, NoProgress())
    assert sorted(events[:2]) == [("draw", False), ("norm", False)]
    assert events[2:] == [("step", True)] * len(PROGRAM.names())
    assert gc.isenabled()
    assert (*stored,) == PROGRAM.names()
    assert {file.name for file in tmp_path.iterdir()} == {one.file for one in stored.values()}


def record_compilations(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the name of each step when its compilation begins."""
    names: dict[int, str] = {}
    trace, lower = Program.trace, jax.stages.Traced.lower
    compile_step = jax.stages.Lowered.compile

    def traced(self: Program, name: str) -> jax.stages.Traced:
        names[id(result := trace(self, name))] = name
        return result

    def lowered(self: jax.stages.Traced) -> jax.stages.Lowered:
        names[id(result := lower(self))] = names[id(self)]
        return result

    def compiled(self: jax.stages.Lowered, *args: Any, **kwargs: Any) -> Any:
        events.append(names[id(self)])
        return compile_step(self, *args, **kwargs)

    monkeypatch.setattr(Program, "trace", traced)
    monkeypatch.setattr(jax.stages.Traced, "lower", lowered)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)


def wait_for(events: list[str], *expected: str) -> None:
    deadline = time.monotonic() + 60
    while not {*expected} <= {*events}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_step_waits_only_for_its_own_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without kernels are compiled while a kernel of another step is being compiled."""
    last, *others = PROGRAM.names()
    first_traced, events = others[-1], list[str]()

    def slow() -> None:
        wait_for(events, last, *others[:-1])
        time.sleep(0.2)  # long enough to notice a step that does not wait
        events.append("kernel")

    kernels = iter([{"slow": slow}])
    monkeypatch.setattr(toolchain, "kernels_in", lambda _: next(kernels, {}))
    record_compilations(events, monkeypatch)
    exec_compile.compile_all(PROGRAM, PROGRAM.names(), tmp_path, NoProgress())
    assert events[-2:] == ["kernel", first_traced]
    assert sorted(events[:-2]) == sorted((last, *others[:-1]))


def test_the_longest_step_and_those_to_link_are_traced_first_and_wait_for_linked_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = PROGRAM.names()
    (linked,), others = names[1:2], names[:1] + names[2:]
    events, begun = list[str](), list[str]()
    trace = Program.trace

    class Call:
        def compile(self, run: Any) -> None:
            wait_for(events, *others)
            time.sleep(0.2)  # long enough to notice a step that does not wait
            events.append("kernels")

    def traced(self: Program, name: str) -> jax.stages.Traced:
        begun.append(name)
        return trace(self, name)

    monkeypatch.setattr(Program, "links_kernels", lambda _, name: name == linked)
    monkeypatch.setattr(toolchain, "link_kernels", lambda *_: [Call()])
    monkeypatch.setattr(toolchain, "KernelPool", Mock())
    monkeypatch.setattr(Program, "trace", traced)
    record_compilations(events, monkeypatch)
    stored = exec_compile.compile_all(PROGRAM, names, tmp_path, NoProgress())
    longest, *rest = reversed(others)
    assert begun == [longest, linked, *rest]
    assert sorted(events[:-2]) == sorted(others)
    assert events[-2:] == ["kernels", linked]
    assert (*stored,) == names


def test_a_kernel_that_cannot_be_compiled_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("TTGIR->LLIR pass failed!")

    steps_with({"draw": fail}, monkeypatch)
    with pytest.raises(ValueError, match="LLIR pass failed"):
        exec_compile.compile_all(PROGRAM, PROGRAM.names(), tmp_path, NoProgress())
    assert gc.isenabled()


def test_executables_are_saved_by_this_thread_after_all_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving holds the interpreter lock, which tracing needs."""
    events: list[str] = []
    here = threading.current_thread()
    executable_file, lower = exec_compile.executable_file, jax.stages.Traced.lower

    def saved(program: Program, name: str, compiled: jax.stages.Compiled) -> Any:
        assert threading.current_thread() is here
        events.append("save")
        return executable_file(program, name, compiled)

    def lowered(self: jax.stages.Traced) -> jax.stages.Lowered:
        events.append("lower")
        return lower(self)

    monkeypatch.setattr(exec_compile, "executable_file", saved)
    monkeypatch.setattr(jax.stages.Traced, "lower", lowered)
    exec_compile.compile_all(PROGRAM, PROGRAM.names(), tmp_path, NoProgress())
    each = len(PROGRAM.names())
    assert events == ["lower"] * each + ["save"] * each


def test_a_step_that_cannot_be_lowered_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(self: Program, name: str) -> jax.stages.Traced:
        if name == PROGRAM.names()[0]:  # traced last, while others are being compiled
            raise ValueError("no such kernel")
        return traced(self, name)

    traced = Program.trace
    monkeypatch.setattr(Program, "trace", trace)
    with pytest.raises(ValueError, match="no such kernel"):
        exec_compile.compile_all(PROGRAM, PROGRAM.names(), tmp_path, NoProgress())
    assert not list(tmp_path.iterdir())
