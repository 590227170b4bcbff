"""The word for "how far along": what loaders report and what the CLI draws.

Owns: the ``Progress`` protocol and the silent implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

type Advance = Callable[[float], None]


class Progress(Protocol):
    """Reports long work: download, conversion, load, compile."""

    def task(self, description: str, total: float | None) -> AbstractContextManager[Advance]:
        """A bar of ``total`` units (None: unknown); the yielded function adds finished units."""
        ...

    def note(self, text: str) -> None:
        """One line that stays, such as a decision that the user should see."""
        ...


class NoProgress:
    """Says nothing."""

    @contextmanager
    def task(self, description: str, total: float | None) -> Generator[Advance]:
        """See ``Progress``."""
        del description, total
        yield lambda amount: None

    def note(self, text: str) -> None:
        """See ``Progress``."""
