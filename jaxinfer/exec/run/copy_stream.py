"""``CopyStream``: copies between a GPU's memory and the host's, beside all other work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxinfer.core.errors import EngineError
from jaxinfer.exec.run.cuda_driver import NON_BLOCKING, calls_on, needed_driver

NOT_READY = 600  # cuda.h: CUDA_ERROR_NOT_READY
DISABLE_TIMING = 2  # cuda.h: CU_EVENT_DISABLE_TIMING


class HostCopy(NamedTuple):
    """Bytes on the device and in host memory, by their addresses."""

    device: int
    host: int
    size: int


class CopyEvent(Protocol):
    """The end of some copies."""

    @property
    def is_done(self) -> bool:
        """True from then on."""
        ...


class CopyStream(Protocol):
    """A queue of copies, which run in their order."""

    def to_device(self, copies: Sequence[HostCopy]) -> CopyEvent:
        """Queue copies from the host."""
        ...

    def to_host(self, copies: Sequence[HostCopy]) -> CopyEvent:
        """Queue copies to the host."""
        ...

    def wait(self) -> None:
        """Wait for all copies."""
        ...


class CudaCopyStream:
    """A stream of a CUDA device. Host memory should be locked (``cuda_driver.locked_memory``):
    then a copy only takes the time to queue it.

    Raises ``EngineError`` where the driver fails; so do all methods.
    """

    def __init__(self, ordinal: int) -> None:
        self._driver, self._ordinal = needed_driver(), ordinal
        self._call, self._stream = calls_on(self._driver, ordinal), ctypes.c_void_p()
        self._checked((self._driver.cuStreamCreate, ctypes.byref(self._stream), NON_BLOCKING))
        self._free: list[ctypes.c_void_p] = []  # events

    def to_device(self, copies: Sequence[HostCopy]) -> CudaEvent:
        """See ``CopyStream``."""
        copy = self._driver.cuMemcpyHtoDAsync_v2
        return self._queued(
            [
                (
                    *(copy, ctypes.c_uint64(one.device), ctypes.c_void_p(one.host)),
                    *(ctypes.c_size_t(one.size), self._stream),
                )
                for one in copies
            ]
        )

    def to_host(self, copies: Sequence[HostCopy]) -> CudaEvent:
        """See ``CopyStream``."""
        copy = self._driver.cuMemcpyDtoHAsync_v2
        return self._queued(
            [
                (
                    *(copy, ctypes.c_void_p(one.host), ctypes.c_uint64(one.device)),
                    *(ctypes.c_size_t(one.size), self._stream),
                )
                for one in copies
            ]
        )

    def wait(self) -> None:
        """See ``CopyStream``."""
        self._checked((self._driver.cuStreamSynchronize, self._stream))

    def _queued(self, copies: Sequence[Any]) -> CudaEvent:
        event = self._free.pop() if self._free else self._new_event()
        self._checked(*copies, (self._driver.cuEventRecord, event, self._stream))
        return CudaEvent(self._is_done, event)

    def _new_event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._checked((self._driver.cuEventCreate, ctypes.byref(event), DISABLE_TIMING))
        return event

    def _is_done(self, event: ctypes.c_void_p) -> bool:
        """True once an event has been reached; it is reused then."""
        if (found := self._call((self._driver.cuEventQuery, event))) == NOT_READY:
            return False
        self._check(found)
        self._free.append(event)
        return True

    def _checked(self, *calls: Any) -> None:
        self._check(self._call(*calls))

    def _check(self, failed: int) -> None:
        if failed:
            raise EngineError(
                f"CUDA's driver copies nothing between the host and device {self._ordinal} (its "
                f"error {failed}); start the engine again"
            )


class CudaEvent:
    """An event of a ``CudaCopyStream``."""

    def __init__(self, query: Callable[[ctypes.c_void_p], bool], event: ctypes.c_void_p) -> None:
        self._query, self._event, self._ended = query, event, False

    @property
    def is_done(self) -> bool:
        """See ``CopyEvent``."""
        self._ended = self._ended or self._query(self._event)
        return self._ended
