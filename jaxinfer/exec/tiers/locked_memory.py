"""``LockedMemory``: a tier's memory from which a GPU copies by itself, allocated piece by piece."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from jaxinfer.core.errors import EngineError

type Allocate = Callable[[int], np.ndarray]  # uint8[size] of locked memory

LOGGER = "jaxinfer.tiers"
PIECE_BYTES = 32 << 20  # the driver is held while a piece is locked: 256 MiB took 0.2 s on an H200


class LockedMemory:
    """Allocates in a thread, so that the engine serves in the meantime. See ``host.Memory``.

    If the system gives no more, there is one warning, and the tier is as large as it is then.
    """

    def __init__(self, num_bytes: int, largest: int, allocate: Allocate) -> None:
        """``largest``: bytes of the largest unit, of which a piece holds a whole number.

        ``allocate``: uint8[size] of locked memory; raises ``EngineError`` if there is none.
        """
        self._num_bytes, self._allocate = num_bytes, allocate
        self._piece_bytes = max(1, PIECE_BYTES // largest) * largest
        self._lock, self._closes = threading.Lock(), threading.Event()
        self._pieces: list[np.ndarray] = []
        self._thread = threading.Thread(target=self._run, name="jaxinfer-lock-memory", daemon=True)
        self._thread.start()

    def taken(self) -> list[np.ndarray]:
        """See ``host.Memory``."""
        if not self._pieces:
            return []
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return pieces

    def close(self) -> None:
        """See ``host.Memory``."""
        self._closes.set()
        self._thread.join()

    def _run(self) -> None:
        left = self._num_bytes
        while left and not self._closes.is_set():
            size = min(left, self._piece_bytes)
            try:
                piece = self._allocate(size)
            except EngineError as error:
                words = "the host tier has %.1f of %.1f GiB: %s"
                done, whole = (self._num_bytes - left) / 2**30, self._num_bytes / 2**30
                logging.getLogger(LOGGER).warning(words, done, whole, error)
                return
            with self._lock:
                self._pieces.append(piece)
            left -= size
