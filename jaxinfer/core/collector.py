"""Python's cyclic collector, where what is made stays.

Owns: ``nothing_collected`` and ``old_left_alone``.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

NEVER = 2**31 - 1  # collections of the younger before one of all


@contextmanager
def nothing_collected() -> Generator[None]:
    """Python's collector rests meanwhile, for what makes many objects that stay.

    It would look at them again and again: at the 140,000 of importing JAX for a quarter of the
    time, at half a million of 33 steps of 36 layers for a seventh, to find 80 MB.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def old_left_alone() -> Generator[None]:
    """Python's collector leaves alone meanwhile what has been there for long.

    A look at all of it comes when a quarter as much has been added, such as names of cached pages:
    with 64 prompts of 1,024 tokens at a time every fourth time, in which a device of 5 ms a step
    waits for 30 ms of JAX's 140,000 objects (two cores of an AMD EPYC), or more. It comes later.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        if old != NEVER:  # else another thread is at it, and puts it back
            gc.set_threshold(young, middle, old)
