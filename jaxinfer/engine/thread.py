"""The engine on its own thread: an inbox of commands in, one wake of the reader a step out.

Owns: ``EngineThread``. Everything that touches the engine runs on the thread; callers only put
commands into the inbox. Must not know: asyncio, HTTP, prompts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import Delta

type Deliver = Callable[[Sequence[Delta]], None]
type Refuse = Callable[[str, JaxinferError], None]


class EngineThread:
    """Runs an engine until ``stop``.

    ``deliver`` is called on the thread once a step with all its deltas; ``refuse`` with the id and
    the error of a request that was not accepted, or of all of them when the engine itself failed.
    Both must return at once.
    """

    def __init__(self, engine: Engine, deliver: Deliver, refuse: Refuse) -> None:
        self._engine = engine
        self._deliver = deliver
        self._refuse = refuse
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failure: EngineError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return self._thread.is_alive() and self._failure is None

    def submit(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Put a request into the inbox; raises ``EngineError`` when nobody would read it."""
        if self._failure is not None:
            raise self._failure
        if self._stopped:
            raise EngineError("the engine is shut down; build a new one")

        def add() -> None:
            try:
                self._engine.add_request(
                    request_id,
                    prompt_token_ids,
                    sampling,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            except JaxinferError as error:
                self._refuse(request_id, error)

        self._inbox.put(add)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free within one step. Unknown ids are ignored."""
        self._inbox.put(lambda: self._engine.abort(request_id))

    def stop(self) -> None:
        """Finish the step at hand, refuse what is open, end the thread."""
        self._stopped = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_commands():
                if not self._engine.has_work:
                    continue
                if deltas := self._engine.step():
                    self._deliver(deltas)
            self._refuse_open(EngineError("the engine was shut down before the answer was done"))
        except Exception as error:
            self._failure = EngineError(f"the engine stopped: {error}; build a new one")
            self._refuse_open(self._failure)

    def _take_commands(self) -> bool:
        """Run every waiting command, sleeping while there is nothing to do; False to end."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._inbox.get(block=block)
            except Empty:
                return True
            if command is None:
                return False
            command()
            block = False

    def _refuse_open(self, error: JaxinferError) -> None:
        for request_id in self._engine.open_request_ids:
            self._refuse(request_id, error)
