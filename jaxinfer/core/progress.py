"""The protocol by which long tasks report progress, and an implementation that shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

type Advance = Callable[[float], None]


class Progress(Protocol):
    """Receives the progress of long tasks: download, conversion, load, compile."""

    def task(self, description: str, total: float | None) -> AbstractContextManager[Advance]:
        """A task of ``total`` units (None: unknown); the yielded function adds finished units."""
        ...

    def note(self, text: str) -> None:
        """Show one line permanently, such as a decision that the user should see."""
        ...


class NoProgress:
    """Shows nothing."""

    def task(self, description: str, total: float | None) -> AbstractContextManager[Advance]:
        """See ``Progress``."""
        return nullcontext(lambda amount: None)

    def note(self, text: str) -> None:
        """See ``Progress``."""


NO_PROGRESS: Final = NoProgress()
