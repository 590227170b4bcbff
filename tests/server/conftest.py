"""Fixtures of several tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.engines import tiny_engine
from kit.server import Serving, serving
from kit.watched_executor import WatchedExecutor, watched_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """A server with default settings."""
    with serving(tiny_engine()) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def watched() -> Iterator[tuple[Serving, WatchedExecutor]]:
    """A server, and the executor of its engine."""
    engine, executor = watched_engine()
    with serving(engine) as server:
        yield server, executor
