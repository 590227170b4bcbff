"""The engine on its own thread: an inbox of commands in, one wake of the reader a step out.

Owns: ``EngineThread``. Everything that changes the engine runs on the thread; callers only put
commands into the inbox. Must not know: asyncio, HTTP, prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Delta

type Deliver = Callable[[Sequence[Delta]], None]
type Refuse = Callable[[str, JaxinferError], None]


class _Submission(NamedTuple):
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    cache_salt: str | None


class _Abort(NamedTuple):
    request_id: str


class _Stop(NamedTuple):
    pass


class EngineThread:
    """Runs an engine until ``stop``.

    ``deliver`` is called on the thread once a step with all its deltas; ``refuse`` with the id and
    the error of a request that was not accepted, and of every unfinished one when the thread ends.
    Both must return at once.
    """

    def __init__(self, engine: Engine, deliver: Deliver, refuse: Refuse) -> None:
        self._engine = engine
        self._deliver = deliver
        self._refuse = refuse
        self._inbox: SimpleQueue[_Submission | _Abort | _Stop] = SimpleQueue()
        self._lock = threading.Lock()  # between "is anybody reading" and putting into the inbox
        self._ended: EngineError | None = None  # why nobody is reading
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
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
        submission = _Submission(request_id, prompt_token_ids, sampling, priority, cache_salt)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._inbox.put(submission)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free within one step. Unknown ids are ignored."""
        self._inbox.put(_Abort(request_id))

    def stop(self) -> None:
        """Finish the step at hand, refuse what is open, end the thread."""
        with self._lock:
            self._ended = self._ended or EngineError("the engine is shut down; build a new one")
        self._inbox.put(_Stop())
        self._thread.join()

    def _run(self) -> None:
        error = EngineError("the engine was shut down before the answer was done")
        try:
            while self._take_commands():
                if self._engine.has_work and (deltas := self._engine.step()):
                    self._deliver(deltas)
        except EngineError as failure:  # the engine itself, not one request
            error = failure
        with self._lock:
            self._ended = self._ended or error
        self._refuse_all(error)

    def _take_commands(self) -> bool:
        """Carry out every waiting command, sleeping while there is nothing to do; False to end."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=block)
            except Empty:
                return True
            block = False
            match command:
                case _Submission():
                    self._add(command)
                case _Abort():
                    self._engine.abort(command.request_id)
                case _Stop():
                    return False

    def _add(self, submission: _Submission) -> None:
        try:
            self._engine.add_request(
                submission.request_id,
                submission.prompt_token_ids,
                submission.sampling,
                priority=submission.priority,
                cache_salt=submission.cache_salt,
            )
        except JaxinferError as error:
            self._refuse(submission.request_id, error)
        except Exception as error:  # whatever is wrong with one request, the others go on
            self._refuse(submission.request_id, RequestError(f"the request is unusable: {error}"))

    def _refuse_all(self, error: JaxinferError) -> None:
        """Refuse what the engine holds and what still waits in the inbox, which nobody can add to
        any more."""
        for request_id in self._engine.open_request_ids:
            self._refuse(request_id, error)
        while not self._inbox.empty():
            if isinstance(command := self._inbox.get(), _Submission):
                self._refuse(command.request_id, error)
