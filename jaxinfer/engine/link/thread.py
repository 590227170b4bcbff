"""The engine on its own thread of this process: an inbox of commands in, news out.

Owns: ``EngineThread``. Everything that changes the engine runs on the thread; callers only put
commands into the inbox.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.link.client import Listener
from jaxinfer.engine.link.commands import Command, Leave, Ping, Stop, Submission

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine


class EngineThread:
    """Runs an engine from ``connect`` to ``stop``. A ``Link``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()  # between "is anybody reading" and putting into the inbox
        self._ended: EngineError | None = None  # why nobody is reading
        self._thread: threading.Thread | None = None

    def connect(self, listener: Listener) -> None:
        """Start the thread; ``listener`` is called on it."""
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="jaxinfer-engine", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return self._ended is None

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Put a request into the inbox; raises ``EngineError`` when nobody would read it."""
        self.put(Submission(request_id, prompt_token_ids, sampling, priority, cache_salt))

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free within one step. Unknown ids are ignored."""
        self._inbox.put(Leave(request_id))

    def ping(self) -> None:
        """Ask for a ``pong``; raises ``EngineError`` when nobody would answer."""
        self.put(Ping())

    def stop(self) -> None:
        """Finish the step at hand, refuse what is open, end the thread."""
        with self._lock:
            self._ended = self._ended or EngineError("the engine is shut down; build a new one")
        self._inbox.put(Stop())
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> EngineError:
        """Return once the thread has ended: why it did."""
        assert self._thread is not None, "connect comes first"
        self._thread.join()
        assert self._ended is not None
        return self._ended

    def put(self, command: Command) -> None:
        """Put a command into the inbox; raises ``EngineError`` when nobody would read it."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._inbox.put(command)

    def _run(self, listener: Listener) -> None:
        error = EngineError("the engine was shut down before the answer was done")
        try:
            while self._take_commands(listener):
                if self._engine.has_work:
                    listener.news(self._engine.step())
                    self._engine.wait_for_room()  # who comes meanwhile is in that step
        except EngineError as failure:  # the engine itself, not one request
            error = failure
        with self._lock:
            self._ended = self._ended or error
        self._refuse_all(listener, error)

    def _take_commands(self, listener: Listener) -> bool:
        """Carry out every waiting command, sleeping while there is nothing to do; False to end."""
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
                case Leave():
                    self._engine.abort(command.request_id)
                case Ping():
                    listener.pong()
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
        except JaxinferError as error:
            listener.refuse(submission.request_id, error)
        except Exception as error:  # whatever is wrong with one request, the others go on
            refusal = RequestError(f"the request is unusable: {error}")
            listener.refuse(submission.request_id, refusal)

    def _refuse_all(self, listener: Listener, error: JaxinferError) -> None:
        """Answer everybody who still waits: the engine's requests, and what is in the inbox, which
        nobody can add to any more."""
        for request_id in self._engine.open_request_ids:
            listener.refuse(request_id, error)
        while not self._inbox.empty():
            match self._inbox.get():
                case Submission(request_id=request_id):
                    listener.refuse(request_id, error)
                case Ping():
                    listener.pong()  # the asker then sees that nobody is alive
                case _:
                    pass
