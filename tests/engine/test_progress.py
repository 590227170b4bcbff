"""Progress is shown as bars on a terminal and as lines elsewhere."""

import io
import logging
import re
import threading

import pytest

from jaxinfer.core.log import LogSettings
from jaxinfer.engine.start import progress as module
from jaxinfer.engine.start.progress import (
    BarProgress,
    LineProgress,
    logged_progress,
    progress_on,
)
from kit.server_process import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawing_threads(before: set[threading.Thread], *, seconds: float = 20) -> int:
    """The number of new threads that do not end within these seconds."""
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(timeout=seconds)
    return sum(thread.is_alive() for thread in new)


def without_times(text: str) -> str:
    """The text with a star for each number of seconds."""
    return re.sub(r"\b\d+\.\d s\b", "* s", text)


def test_a_pipe_gets_one_line_for_each_finished_task() -> None:
    stream = io.StringIO()
    progress = progress_on(stream)
    assert isinstance(progress, LineProgress)
    with progress.task("load", 2_500_000, "B") as advance:
        advance(1_000_000)
        assert stream.getvalue() == ""
        advance(1_500_000)
    with progress.task("compile", 2):
        pass
    with progress.phase("start"):
        pass
    with pytest.raises(ValueError), progress.task("fail", 3):
        raise ValueError
    assert without_times(stream.getvalue()) == "load: 2.5 MB in * s\ncompile: * s\n"


def test_nothing_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come without an advance, about the task that began last, and end with it."""
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.05)
    before, lines = set(threading.enumerate()), list[str]()
    progress = LineProgress(lines.append)
    with progress.phase("start"), progress.task("compile", 8) as advance:
        wait_until(lambda: len(lines) >= 2, "lines without an advance")
        advance(2)
        wait_until(lambda: sum("compile: 2" in line for line in lines) >= 2, "lines after it")
    assert re.fullmatch(r"compile: 0 of 8 after \d s", lines[0])
    assert re.fullmatch(r"compile: 2 of 8 after \d s, about \d+ s left", lines[-2])
    assert re.fullmatch(r"compile: \d+\.\d s", lines[-1])
    assert drawing_threads(before) == 0


@pytest.mark.parametrize(
    ("total", "unit", "done", "words"),
    [
        (8, "", 2, "t: 2 of 8 after 10 s, about 30 s left"),
        (8, "", 0, "t: 0 of 8 after 10 s"),
        (93_400_000, "B", 31_200_000, "t: 31.2 of 93.4 MB after 10 s, about 20 s left"),
        (None, "tokens", 120, "t: 120 tokens after 10 s"),
        (None, "", 0, "t: after 10 s"),
    ],
)
def test_words_about_a_running_task(
    total: float | None, unit: str, done: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 10.0)
    task = module._Task("t", total, unit, start=0.0, done=done)
    assert task.status() == words


def test_details_are_shown_on_request() -> None:
    quiet, loud = io.StringIO(), io.StringIO()
    for stream, verbose in ((quiet, False), (loud, True)):
        progress = progress_on(stream, verbose=verbose)
        progress.detail("arithmetic")
        progress.note("decision")
    assert quiet.getvalue() == "decision\n"
    assert loud.getvalue() == "arithmetic\ndecision\n"


@pytest.mark.parametrize("level", ["info", "debug"])
def test_progress_in_a_log(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, module.LOGGER)
    progress = logged_progress(LogSettings(level=level))
    progress.detail("two\nlines")
    with progress.task("load", 1):
        pass
    records = caplog.records
    texts = [(record.levelname, without_times(vars(record)["text"])) for record in records]
    details = [("DEBUG", "two"), ("DEBUG", "lines")] if level == "debug" else []
    assert texts == [*details, ("INFO", "load: * s")]


def test_a_terminal_gets_bars_while_tasks_run() -> None:
    before = set(threading.enumerate())
    stream = Terminal()
    progress = progress_on(stream)
    assert isinstance(progress, BarProgress)
    for _ in range(2):  # the display can start again
        with progress.task("Outer", 2) as outer, progress.task("Inner", None) as inner:
            outer(1)
            inner(5)
            assert drawing_threads(before, seconds=0) == 1
            wait_until(lambda: "50%" in stream.getvalue(), "a bar")
        assert drawing_threads(before) == 0
    assert "Outer" in stream.getvalue()


def test_bars_stop_when_a_task_fails() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError), progress_on(Terminal()).task("Load", 1):
        raise ValueError
    assert drawing_threads(before) == 0
