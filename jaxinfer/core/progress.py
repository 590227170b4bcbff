"""The protocol by which long tasks report progress, and an implementation that shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

type Advance = Callable[[float], None]


class Progress(Protocol):
    """Receives the progress of long tasks: download, conversion, load, compile."""

    def task(
        self, description: str, total: float | None, unit: str = ""
    ) -> AbstractContextManager[Advance]:
        """A task of ``total`` units (None: unknown); the yielded function adds finished units.

        ``unit`` is "B" for bytes, which are shown as MB, or the name of what is counted.
        """
        ...

    def phase(self, description: str, unit: str = "") -> AbstractContextManager[Advance]:
        """A span with an end that its caller reports, such as a start: only a sign of life."""
        ...

    def note(self, text: str) -> None:
        """Show one line permanently, such as a decision that the user should see."""
        ...

    def detail(self, text: str) -> None:
        """The same for lines that only a debug log or ``--stats`` shows."""
        ...


class NoProgress:
    """Shows nothing."""

    def task(
        self, description: str, total: float | None, unit: str = ""
    ) -> AbstractContextManager[Advance]:
        """See ``Progress``."""
        return nullcontext(lambda amount: None)

    def phase(self, description: str, unit: str = "") -> AbstractContextManager[Advance]:
        """See ``Progress``."""
        return nullcontext(lambda amount: None)

    def note(self, text: str) -> None:
        """See ``Progress``."""

    def detail(self, text: str) -> None:
        """See ``Progress``."""


NO_PROGRESS: Final = NoProgress()
