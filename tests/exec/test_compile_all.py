"""From a program to compiled executables and their files."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.core.progress import NoProgress
from jaxinfer.exec import compile as exec_compile
from jaxinfer.exec import kernels as exec_kernels
from jaxinfer.exec.program import Program
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model

PROGRAM = Program(
    tiny_model("llama")[0], tiny_limits(max_num_seqs=1, max_num_batched_tokens=16), platform="cpu"
)


def steps_with(kernels: dict[str, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has these kernels in it."""
    monkeypatch.setattr(exec_kernels, "kernels_in", lambda _: kernels)


def test_kernels_are_compiled_once_elsewhere_and_before_what_needs_them(
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
    stored = exec_compile.compile_all(PROGRAM, tmp_path, NoProgress())
    assert sorted(events[:2]) == [("draw", False), ("norm", False)]
    assert events[2:] == [("step", True)] * len(PROGRAM.names())
    assert gc.isenabled()
    assert (*stored,) == PROGRAM.names()
    assert {file.name for file in tmp_path.iterdir()} == {one.file for one in stored.values()}


def test_a_kernel_that_cannot_be_compiled_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("TTGIR->LLIR pass failed!")

    steps_with({"draw": fail}, monkeypatch)
    with pytest.raises(ValueError, match="LLIR pass failed"):
        exec_compile.compile_all(PROGRAM, tmp_path, NoProgress())
    assert gc.isenabled()


def test_what_ends_after_a_failure_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is gone then, or already that of the next try."""
    failed, others = threading.Event(), set(threading.enumerate())
    *_, last = PROGRAM.names()  # is the first to be compiled

    def slow(*args: Any) -> Any:
        assert failed.wait(10)
        return executable_file(*args)

    def trace(self: Program, name: str) -> jax.stages.Traced:
        if name != last:
            raise ValueError("no such kernel")
        return traced(self, name)

    executable_file, traced = exec_compile.executable_file, Program.trace
    monkeypatch.setattr(exec_compile, "executable_file", slow)
    monkeypatch.setattr(Program, "trace", trace)
    with pytest.raises(ValueError, match="no such kernel"):
        exec_compile.compile_all(PROGRAM, tmp_path, NoProgress())
    failed.set()
    (compiling,) = set(threading.enumerate()) - others
    compiling.join(30)
    assert not compiling.is_alive() and not list(tmp_path.iterdir())
