"""Stops an engine between the steps of a request, so that a test finds the request open."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxinfer.core.step import StepPlan
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.loop.engine import Engine


class Brake:
    """Lets an engine launch a few steps, and then no other before the test's next command.

    A tiny model draws twenty tokens before a busy event loop reads the first, so that a request
    that a test finds open may have ended. ``close`` comes before a request is sent; ``arm`` after
    its first token: the command that follows is the last that the engine waits for.
    """

    STEPS = 5

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        executor = engine._loop._executor
        self._launch, executor.launch = executor.launch, self._launch_or_wait
        for name in ("_pass", "_put_change"):
            setattr(thread, name, partial(self._command, getattr(thread, name)))
        self._num_launches, self._closed, self._armed = 0, False, False

    def close(self) -> None:
        self._num_launches, self._closed, self._armed = 0, True, False

    def arm(self) -> None:
        self._armed = True

    def _command(self, put: Callable[[Any], None], command: Any) -> None:
        put(command)
        self._num_launches, self._closed = 0, self._closed and not self._armed

    def _launch_or_wait(self, plan: StepPlan) -> Any:
        self._num_launches += 1
        deadline = time.monotonic() + 30
        while self._closed and self._num_launches > self.STEPS and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._launch(plan)
