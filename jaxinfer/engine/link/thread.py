"""The engine on its own thread of this process: commands in through an inbox, news out.

Only the thread changes the engine; other threads put commands into the inbox.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.engine.link.client import Link
from jaxinfer.engine.link.wire import (
    AbortRequest,
    Command,
    Failed,
    Listener,
    Ping,
    Pong,
    Refused,
    Stop,
    Submission,
)

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine


class EngineThread(Link):
    """A link that runs an engine from ``connect`` to ``stop``."""

    def __init__(self, engine: Engine) -> None:
        self.limits = engine.limits
        self.facts = engine.facts
        self.tokenizer = engine.tokenizer
        self.stats = engine.stats()
        self._engine = engine
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def connect(self, listener: Listener) -> None:
        """See ``Link``."""
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="jaxinfer-engine", daemon=True
        )
        self._thread.start()

    def _pass(self, command: Command) -> None:
        self._inbox.put(command)

    def stop(self) -> None:
        """See ``Link``."""
        self._ended = self._ended or EngineError("the engine is shut down; build a new one")
        self._inbox.put(Stop())
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        assert self._thread is not None, "connect comes first"
        self._thread.join()

    def _run(self, listener: Listener) -> None:
        error = EngineError("the engine was shut down before the answer was done")
        try:
            while self._take_commands(listener):
                if self._engine.has_work:
                    listener(self._engine.step())
                    self._engine.wait_until_launchable()  # requests that arrive now join it
        except EngineError as failure:  # the engine failed, not one request
            error = failure
        self._ended = self._ended or error
        listener(Failed.of(error))

    def _take_commands(self, listener: Listener) -> bool:
        """Execute all waiting commands; waits for one while the engine is idle. False: stop."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=block)
            except Empty:
                return True
            block = False
            match command:
                case Submission():
                    self._add(command, listener)
                case AbortRequest():
                    self._engine.abort(command.request_id)
                case Ping():
                    listener(Pong())
                case Stop():
                    return False

    def _add(self, submission: Submission, listener: Listener) -> None:
        try:
            self._engine.add_request(
                submission.request_id,
                submission.prompt_token_ids,
                submission.sampling,
                priority=submission.priority,
                cache_salt=submission.cache_salt,
            )
        except Exception as error:  # an error of one request must not stop the others
            if not isinstance(error, JaxinferError):
                error = RequestError(f"the request is unusable: {error}")
            listener(Refused(submission.request_id, Failed.of(error)))
