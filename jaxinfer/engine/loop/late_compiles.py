"""The alarm on late compilation: after start-up, nothing may compile on the serving path.

Owns: a counter fed by jax's own compile events. Buckets cannot compile late (a compiled function
refuses any other shape), so what this catches is host code with a jax operation in a turn.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class LateCompiles:
    """Counts compilations that happen on the watching thread inside ``watch``."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None

    @contextmanager
    def watch(self) -> Generator[None]:
        """Count what compiles in this block, on this thread."""
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == COMPILE_EVENT and threading.get_ident() == self._thread:
            self.count += 1
