"""Ctrl-C between iterations of the engine, never inside one.

Python raises KeyboardInterrupt between any two instructions. Inside an iteration this could lose a
step whose tokens the scheduler waits for, after which the engine is unusable.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Generator[None]:
    """Defer SIGINT to the end of the block, where its usual handler runs.

    Python handles signals on the main thread only, so on other threads this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: deferred.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred:
            handler(*deferred[0])
