"""Ctrl-C between turns of the engine, never inside one.

Owns: ``interrupts_deferred``. Python raises KeyboardInterrupt between any two instructions; inside
a turn that could lose a step whose tokens the scheduler still waits for, and the engine with it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Generator[None]:
    """Within the block SIGINT only waits; at the end it takes its usual course.

    Signals reach the main thread alone, so on any other there is nothing to do.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])
