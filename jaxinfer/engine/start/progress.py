"""Progress on stderr: bars on a terminal, else lines for finished and for long tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

from jaxinfer.core.progress import Advance, Progress

LINE_SECONDS = 10.0  # between two lines of a running task


def progress_on(stream: TextIO) -> Progress:
    """The implementation for a stream: bars for a terminal, else lines."""
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


class LineProgress:
    """For logs and pipes: one line for each finished task, and every 10 s for a running one.

    Tasks may be advanced from any thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def task(self, description: str, total: float | None) -> Generator[Advance]:
        """See ``Progress``. A task that fails writes no line, as its error is reported."""
        start = last_line = time.monotonic()
        done = 0.0
        lock = threading.Lock()

        def advance(amount: float) -> None:
            nonlocal last_line, done
            with lock:
                done += amount
                now = time.monotonic()
                if total and now - last_line >= LINE_SECONDS:
                    last_line = now
                    self.note(f"{description}: {done / total:.0%} after {now - start:.0f} s")

        yield advance
        seconds = time.monotonic() - start
        self.note(f"{description}: {seconds:.1f} s")

    def note(self, text: str) -> None:
        """See ``Progress``."""
        self._stream.write(f"{text}\n")
        self._stream.flush()


class BarProgress:
    """For terminals: a bar with the time left for each running task; finished bars disappear.

    Tasks may overlap and may be advanced from any thread; one live display shows them all.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(file=stream),
            transient=True,
        )
        self._lock = threading.Lock()

    @contextmanager
    def task(self, description: str, total: float | None) -> Generator[Advance]:
        """See ``Progress``."""
        with self._lock:
            bar = self._bars.add_task(description, total=total)
            self._bars.start()
        try:
            yield lambda amount: self._bars.advance(bar, amount)
        finally:
            with self._lock:
                self._bars.remove_task(bar)
                if not self._bars.tasks:
                    self._bars.stop()

    def note(self, text: str) -> None:
        """See ``Progress``; above the running bars."""
        self._bars.console.print(text, highlight=False, markup=False, soft_wrap=True)
