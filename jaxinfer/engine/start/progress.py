"""Progress on stderr or in a log: bars on a terminal, else lines of finished and long tasks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from jaxinfer.core.log import LogSettings, tell
from jaxinfer.core.progress import Advance, Progress

LOGGER = "jaxinfer.start"
QUIET_SECONDS = 2.5  # after which the running task is reported: nothing is silent for 3 s


def progress_on(stream: TextIO, *, verbose: bool = False) -> Progress:
    """The implementation for a stream: bars for a terminal, else lines.

    ``verbose``: details such as the memory plan are shown as well.
    """
    if stream.isatty():
        return BarProgress(stream, verbose=verbose)

    def write(text: str) -> None:
        stream.write(f"{text}\n")
        stream.flush()

    return LineProgress(write, write if verbose else None)


def logged_progress(settings: LogSettings) -> Progress:
    """Progress as lines of the log; details at level debug."""
    logger = logging.getLogger(LOGGER)

    def write(text: str) -> None:
        tell(logger, logging.INFO, "progress", text)

    def write_detail(text: str) -> None:
        for line in text.splitlines():
            tell(logger, logging.DEBUG, "detail", line)

    return LineProgress(write, write_detail if settings.number <= logging.DEBUG else None)


@dataclass(eq=False)
class _Task:
    """A running task, for a line about it."""

    description: str
    total: float | None
    unit: str
    start: float = field(default_factory=time.monotonic)
    done: float = 0.0

    def status(self) -> str:
        """How far it is: amounts, seconds, and the seconds left if they can be told."""
        seconds = time.monotonic() - self.start
        words = f"{self.description}: {_amount(self.done, self.total, self.unit)}"
        left = ""
        if self.total and self.done:
            left = f", about {seconds * (self.total / self.done - 1):.0f} s left"
        return f"{words}after {seconds:.0f} s{left}"

    def end(self) -> str:
        """The line of a finished task."""
        size = _amount(self.total, None, self.unit) if self.total and self.unit else ""
        return f"{self.description}: {size}{'in ' if size else ''}{self.seconds():.1f} s"

    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.start


def _amount(done: float, total: float | None, unit: str) -> str:
    """``31.2 of 93.4 MB ``, ``2 of 7 ``, ``120 tokens ``; empty if nothing is counted."""
    if unit == "B":
        power = max(step for step in range(5) if step == 0 or (total or done) >= 1000**step)
        scale, unit = 1000**power, ("B", "kB", "MB", "GB", "TB")[power]
        shown = [f"{amount / scale:.{1 if power else 0}f}" for amount in (done, total or 0)]
    else:
        shown = [f"{amount:.0f}" for amount in (done, total or 0)]
    if total is None:
        return f"{shown[0]} {unit} ".replace("  ", " ") if done else ""
    return f"{shown[0]} of {shown[1]} {unit} ".replace("  ", " ")


class LineProgress:
    """For logs and pipes: a line for each finished task, and for a running one as soon as no line
    was written for ``QUIET_SECONDS``, also while the task does not advance.

    ``write`` takes a line, ``write_detail`` one of ``detail``. Tasks may be advanced from any
    thread.
    """

    def __init__(
        self, write: Callable[[str], None], write_detail: Callable[[str], None] | None = None
    ) -> None:
        self._write = write
        self._write_detail = write_detail
        self._changed = threading.Condition()  # holds its lock while a line is written
        self._tasks: list[_Task] = []
        self._last_line = time.monotonic()
        self._watched = False

    @contextmanager
    def task(self, description: str, total: float | None, unit: str = "") -> Generator[Advance]:
        """See ``Progress``. A task that fails writes no line, as its error is reported."""
        with self._running(_Task(description, total, unit)) as task:
            yield self._advance(task)
        self.note(task.end())

    @contextmanager
    def phase(self, description: str, unit: str = "") -> Generator[Advance]:
        """See ``Progress``."""
        with self._running(_Task(description, None, unit)) as task:
            yield self._advance(task)

    def note(self, text: str) -> None:
        """See ``Progress``."""
        with self._changed:
            self._write(text)
            self._last_line = time.monotonic()

    def detail(self, text: str) -> None:
        """See ``Progress``."""
        if self._write_detail is not None:
            with self._changed:
                self._write_detail(text)

    def _advance(self, task: _Task) -> Advance:
        def advance(amount: float) -> None:
            with self._changed:
                task.done += amount

        return advance

    @contextmanager
    def _running(self, task: _Task) -> Generator[_Task]:
        with self._changed:
            if not self._tasks:
                self._last_line = time.monotonic()
            self._tasks.append(task)
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="jaxinfer-progress", daemon=True).start()
        try:
            yield task
        finally:
            with self._changed:
                self._tasks.remove(task)
                self._changed.notify()

    def _watch(self) -> None:
        """Report the task that began last whenever no line was written for a while."""
        with self._changed:
            while self._tasks:
                left = self._last_line + QUIET_SECONDS - time.monotonic()
                if left <= 0:
                    self.note(self._tasks[-1].status())
                self._changed.wait(left if left > 0 else QUIET_SECONDS)
            self._watched = False


class BarProgress:
    """For terminals: a bar with the time left for each running task; finished bars disappear.

    Tasks may overlap and may be advanced from any thread; one live display shows them all.
    """

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        from rich import progress
        from rich.console import Console

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[amount]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=stream),
            transient=True,
        )
        self._lock = threading.Lock()
        self._verbose = verbose

    @contextmanager
    def task(self, description: str, total: float | None, unit: str = "") -> Generator[Advance]:
        """See ``Progress``."""
        task = _Task(description, total, unit)
        with self._lock:
            bar = self._bars.add_task(description, total=total, amount="")
            self._bars.start()

        def advance(amount: float) -> None:
            task.done += amount
            shown = _amount(task.done, total, unit).strip()
            self._bars.update(bar, advance=amount, amount=shown)

        try:
            yield advance
        finally:
            with self._lock:
                self._bars.remove_task(bar)
                if not self._bars.tasks:
                    self._bars.stop()

    def phase(self, description: str, unit: str = ""):
        """See ``Progress``."""
        return self.task(description, None, unit)

    def note(self, text: str) -> None:
        """See ``Progress``; above the running bars."""
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """See ``Progress``."""
        if self._verbose:
            self.note(text)
