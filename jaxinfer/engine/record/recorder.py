"""``Recorder``: writes what an engine's loop does into a recording, on a thread of its own.

The loop only puts references to immutable values into a queue. If the disk is so slow that
``MOST_WAITING`` calls wait, the following ones are left out until the queue is empty, and then a
file with a new state of the scheduler begins. If the disk fails, the recording ends with one
message in the log, and the engine goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from msgspec.structs import replace

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.step import Event
from jaxinfer.engine.record.codec import encode_call, encode_note, encode_state, summary_of
from jaxinfer.engine.record.file import FileWriter, Header, keep_previous, older
from jaxinfer.engine.record.redact import Redactor
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState

LOGGER = "jaxinfer.engine"
MOST_WAITING = 4096  # calls; at 2 ms each some 8 s of a disk that does not answer
MOST_STATES = 4  # a file has at least so many times the bytes of its state, or few calls fit
CLOSE_SECONDS = 10.0  # for the last calls to be written


class _Called(NamedTuple):
    """One call of the scheduler. ``output`` is None if it raised."""

    number: int
    before: SchedulerState
    events: Sequence[Event]
    output: ScheduleOutput | None
    after: SchedulerState


class _Noted(NamedTuple):
    number: int
    kind: str
    text: str


class Recorder:
    """Follows the calls of an engine's scheduler; see ``engine.loop.interfaces.Observer``."""

    def __init__(self, path: Path, num_bytes: int, header: Header) -> None:
        """``num_bytes``: of both files of the ring. Raises ``ConfigError`` if ``path`` cannot be
        written.
        """
        self.path, self._half = path, num_bytes // 2
        self._header = replace(header, run=secrets.token_hex(8))
        self._redactor = Redactor() if header.is_redacted else None
        try:
            keep_previous(path)
            path.open("wb").close()
        except OSError as error:
            raise ConfigError(
                f"the recording {path} cannot be written ({error.strerror}); choose another file"
            ) from error
        self._number = 0  # of the next call
        self._skips = False  # the queue was too long: calls are left out until it is empty
        self._waiting: SimpleQueue[_Called | _Noted | None] = SimpleQueue()
        self._file: FileWriter | None = None
        self._most = 0  # bytes of the file
        self._weights: str | None = None  # the reference of those that replaced the first ones
        self._next = -1  # the call that follows the last one in the file
        self._ended = False
        self._thread = threading.Thread(target=self._write, name="jaxinfer-record", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def scheduled(
        self,
        before: SchedulerState,
        events: Sequence[Event],
        output: ScheduleOutput | None,
        after: SchedulerState,
    ) -> None:
        """A call of the scheduler; ``output`` is None if it raised."""
        number, self._number = self._number, self._number + 1
        waiting = self._waiting.qsize()
        self._skips = waiting > 0 if self._skips else waiting >= MOST_WAITING
        if not self._skips and not self._ended:
            self._waiting.put(_Called(number, before, events, output, after))

    def weights_changed(self, reference: str) -> None:
        """Steps from now on read weights that came from here; empty: from a tree."""
        if not self._ended:
            self._waiting.put(_Noted(self._number, "weights", reference))

    def close(self) -> None:
        """Write what waits, and close the file."""
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    # on the recorder's thread

    def _write(self) -> None:
        try:
            while (item := self._waiting.get()) is not None:
                self._take(item)
                if self._file is not None and self._waiting.empty():
                    self._file.flush()
        except OSError as error:
            logging.getLogger(LOGGER).error(
                "the recording %s has ended, as it cannot be written (%s); the engine goes on",
                self.path,
                error.strerror,
            )
        except Exception:
            logging.getLogger(LOGGER).exception(
                "the recording %s has ended with an error; the engine goes on", self.path
            )
        finally:
            self._ended = True
            if self._file is not None:
                with suppress(OSError):  # it has been reported
                    self._file.close()

    def _take(self, item: _Called | _Noted) -> None:
        if isinstance(item, _Noted):
            self._weights = item.text
            if self._file is not None:
                self._file.add(encode_note(*item))
            return
        number, before, events, output, after = item
        if self._redactor is not None:
            if number != max(self._next, 0):
                raise RuntimeError("the disk is too slow for a redacted recording")
            before, events, output, after = self._redactor.call(before, events, output, after)
        if self._file is None or number != self._next or self._file.num_bytes >= self._most:
            self._begin(number, before)
        assert self._file is not None
        summary = None if output is None else summary_of(output, after)
        self._file.add(encode_call(number, events, summary))
        self._next = number + 1

    def _begin(self, number: int, state: SchedulerState) -> None:
        """Begin a new file with the state before a call."""
        if self._file is not None:
            self._file.close()
            os.replace(self.path, older(self.path))
        self._file = FileWriter(self.path, self._header)
        self._header = replace(self._header, number=self._header.number + 1)
        self._file.add(encode_state(number, state))
        if self._weights is not None:
            self._file.add(encode_note(number, "weights", self._weights))
        self._most = max(self._half, MOST_STATES * self._file.num_bytes)
