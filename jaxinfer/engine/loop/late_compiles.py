"""Counts late compiles: after the start nothing may compile while requests are served.

The counter reads JAX's compile events. Steps cannot compile late, since a compiled function refuses
other shapes; a compile comes from host code that calls a JAX operation in an iteration.
"""

from __future__ import annotations

import threading
from typing import Any

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class LateCompiles:
    """A context manager that counts the compilations in its blocks on the thread of the block."""

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == COMPILE_EVENT and threading.get_ident() == self._thread:
            self.count += 1
