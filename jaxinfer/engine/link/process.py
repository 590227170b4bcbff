"""The server's side of an engine in its own process, so that the server never holds its GIL."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Self

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.core.log import LogSettings
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.spawn import Spawned
from jaxinfer.engine.link.wire import (
    Build,
    Channel,
    Command,
    Failed,
    FromEngine,
    Listener,
    Planned,
    Ready,
    Stop,
    Submission,
    ToEngine,
)
from jaxinfer.text.tokenizer import load_tokenizer

LOGGER = "jaxinfer.engine"
STOP_SECONDS = 10.0  # for the current step to finish


class EngineProcess(Link):
    """A link to an engine's process: ``ready``, ``connect``; always ``stop`` it."""

    def __init__(
        self, config: EngineConfig, spawned: Spawned, *, log: LogSettings | None = None
    ) -> None:
        """Send ``config`` and return at once. ``log``: of the start, which the process writes."""
        self._process = spawned.process
        self._channel = Channel[ToEngine, FromEngine](spawned.end, FromEngine)
        self._messages = self._channel.messages()
        self._reader: threading.Thread | None = None
        self._channel.send(Build(config, log))

    def ready(self) -> Self:
        """Wait for the engine; raises the errors of ``start_engine``, after which it has ended."""
        try:
            self._wait_until_ready()
        except JaxinferError:
            self.stop()
            raise
        return self

    def _wait_until_ready(self) -> None:
        for message in self._messages:
            match message:
                case Planned(limits, tokenizer):
                    self.limits = limits  # the tokenizer is read while the engine compiles
                    self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
                case Ready(facts, stats):
                    self.facts, self.stats = facts, stats
                    return
                case Failed():
                    raise message.error
                case _:
                    raise AssertionError(f"{message} before the engine was ready")
        raise self._ending("while it was starting")

    def connect(self, listener: Listener) -> None:
        """See ``Link``."""
        self._reader = threading.Thread(
            target=self._follow, args=(listener,), name="jaxinfer-engine-news", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id, which is also its process group."""
        return self._process.pid

    def _pass(self, command: Command) -> None:
        try:
            is_request = isinstance(command, Submission)
            self._channel.send(command.packed() if is_request else command)
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from error

    def stop(self) -> None:
        """See ``Link``; a process that does not end in time is killed."""
        was_alive = self._ended is None
        self._ended = self._ended or EngineError("the engine is shut down; build a new one")
        if self._reader is None:  # not connected, so no request is open
            self._channel.hang_up()
        elif was_alive:
            self._channel.send(Stop())
        self._reap()
        if self._reader is not None:
            self._reader.join()

    def _follow(self, listener: Listener) -> None:
        """Pass messages to the listener until the engine's process exits."""
        error: JaxinferError | None = None
        try:
            for message in self._messages:
                match message:
                    case Failed():
                        error = message.error
                    case Planned() | Ready():
                        raise AssertionError(f"{message} while the engine runs")
                    case _:
                        listener(message)
        finally:
            self._end(error, listener)

    def _end(self, error: JaxinferError | None, listener: Listener) -> None:
        """Refuse open and future requests: the engine answers no more."""
        if not isinstance(error, EngineError):
            error = self._ending("before the answer was done")
        if self._ended is None:  # not by ``stop``, and perhaps no open request reports it
            logging.getLogger(LOGGER).error(str(error))
        self._ended = self._ended or error
        listener(Failed.of(error))
        self._channel.hang_up()

    def _ending(self, when: str) -> EngineError:
        """The error for a process that ended without a message."""
        self._reap()
        code = self._process.returncode
        if code >= 0:
            return EngineError(f"the engine's process exited with code {code} {when}; start again")
        name = signal.Signals(-code).name
        cause = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return EngineError(f"the engine's process was killed by {name} {when}{cause}; start again")

    def _reap(self) -> None:
        """Wait until the process has ended; kill it after ``STOP_SECONDS``."""
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logging.getLogger(LOGGER).warning(
                "the engine did not end in %g s and is killed", STOP_SECONDS
            )
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
