"""Progress is shown as bars on a terminal and as lines elsewhere."""

import io
import threading

import pytest

from jaxinfer.engine.start.progress import BarProgress, LineProgress, progress_on


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawing_threads(before: set[threading.Thread]) -> int:
    """The number of new threads that do not end within a second."""
    return sum(not ended(thread) for thread in set(threading.enumerate()) - before)


def ended(thread: threading.Thread) -> bool:
    thread.join(timeout=1)
    return not thread.is_alive()


def test_a_pipe_gets_one_line_for_each_finished_task() -> None:
    stream = io.StringIO()
    progress = progress_on(stream)
    assert isinstance(progress, LineProgress)
    with progress.task("Load", 2) as advance:
        advance(1)
        assert stream.getvalue() == ""
        advance(1)
    with pytest.raises(ValueError), progress.task("Compile", 3):
        raise ValueError
    assert stream.getvalue() == "Load: 0.0 s\n"


def test_a_pipe_gets_lines_while_a_long_task_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = io.StringIO(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with progress_on(stream).task("Compile", 8) as advance:
        for seconds in (9, 10, 11, 21):
            clock[0] = seconds
            advance(1)
    lines = ["Compile: 25% after 10 s", "Compile: 50% after 21 s", "Compile: 21.0 s"]
    assert stream.getvalue().splitlines() == lines
    with progress_on(stream).task("Unknown", None) as advance:
        clock[0] += 60
        advance(1)
    assert stream.getvalue().splitlines()[3:] == ["Unknown: 60.0 s"]


def test_a_terminal_gets_bars_while_tasks_run() -> None:
    before = set(threading.enumerate())
    stream = Terminal()
    progress = progress_on(stream)
    assert isinstance(progress, BarProgress)
    for _ in range(2):  # the display can start again
        with progress.task("Outer", 2) as outer, progress.task("Inner", None) as inner:
            outer(1)
            inner(5)
            assert drawing_threads(before) == 1
        assert drawing_threads(before) == 0
    assert "Outer" in stream.getvalue()
    assert "50%" in stream.getvalue()


def test_bars_stop_when_a_task_fails() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError), progress_on(Terminal()).task("Load", 1):
        raise ValueError
    assert drawing_threads(before) == 0
