"""The engine on its own thread of this process: commands in through an inbox, news out.

Only the thread changes the engine; other threads put commands into the inbox.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.engine.link.client import Link
from jaxinfer.engine.link.wire import (
    AbortRequest,
    Command,
    Control,
    Controlled,
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


# While an idle engine compiles in the background, it looks this often for loaded executables.
COMPILING_SECONDS = 0.25
NUM_COMPILERS = 2  # threads: one slow grammar does not hold up the others


class _Ready(NamedTuple):
    """A submission that can be added to the engine."""

    submission: Submission
    constraint: Constraint | None = None


class _Compiled(NamedTuple):
    """A submission and the future of its constraint, which has been compiled or refused."""

    submission: Submission
    constraint: Future[Any]  # a ``Constraint``


class _Change(NamedTuple):
    """A function that may run only while no request is open."""

    function: Callable[[], Any]
    aborts: bool
    done: Future[Any]


class EngineThread(Link):
    """A link that runs an engine from ``connect`` to ``stop``."""

    def __init__(self, engine: Engine) -> None:
        self.limits = engine.limits
        self.facts = engine.facts
        self.tokenizer = engine.tokenizer
        self.stats = engine.stats()
        self._engine = engine
        self._inbox: SimpleQueue[Command | _Change | _Compiled] = SimpleQueue()
        self._compiling: set[str] = set()  # requests whose constraints are compiled now
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "jaxinfer-grammar")
        self._changes: list[_Change] = []  # that wait for the engine to become idle
        self._held: list[_Ready] = []  # that arrived after the first of these, or in a pause
        self._paused = False
        self._thread: threading.Thread | None = None

    def connect(self, listener: Listener) -> None:
        """See ``Link``."""
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="jaxinfer-engine", daemon=True
        )
        self._thread.start()

    def _pass(self, command: Command) -> None:
        self._inbox.put(command)

    def while_idle[T](self, function: Callable[[], T], *, aborts: bool = False) -> Future[T]:
        """Call a function on the engine's thread while no request is open.

        Requests that are open now are completed first, or aborted; later ones wait for the
        function. Returns a future of its result or exception.
        """
        if self._ended is not None:
            raise self._ended
        done: Future[T] = Future()
        self._put_change(_Change(function, aborts, done))
        return done

    def _put_change(self, change: _Change) -> None:
        self._inbox.put(change)
        if self._ended is not None:  # it has ended meanwhile, and may not have seen the change
            self._fail_changes(self._ended)

    def stop(self) -> None:
        """See ``Link``."""
        self._ended = self._ended or EngineError("the engine is shut down; build a new one")
        self._compilers.shutdown(wait=False, cancel_futures=True)
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
        self._engine.close()
        listener(Failed.of(error))
        self._fail_changes(error)

    def _take_commands(self, listener: Listener) -> bool:
        """Execute all waiting commands; waits for one while the engine is idle. False: stop."""
        self._make_changes(listener)
        block = not self._engine.has_work
        timeout = COMPILING_SECONDS if self._engine.is_compiling else None
        while True:
            try:
                command = self._inbox.get(block=block, timeout=timeout)
            except Empty:
                return True
            match command:
                case Submission() if command.sampling.is_constrained:
                    self._compile(command)
                case Submission():
                    self._add_or_hold(_Ready(command), listener)
                case _Compiled():
                    self._take_compiled(command, listener)
                case AbortRequest():
                    self._compiling.discard(command.request_id)
                    self._held = [
                        one for one in self._held if one.submission.request_id != command.request_id
                    ]
                    self._engine.abort(command.request_id)
                case Ping():
                    listener(Pong())
                case Control():
                    self._control(command, listener)
                case _Change():
                    self._changes.append(command)
                    if command.aborts:
                        self._engine.abort_all()
                    self._make_changes(listener)
                case Stop():
                    return False
            block = False

    def _make_changes(self, listener: Listener) -> None:
        """Make the changes that wait, if the engine is idle, and then add the held requests."""
        if not self._changes or self._engine.has_work:
            return
        changes, self._changes = self._changes, []
        for change in changes:
            if not change.done.set_running_or_notify_cancel():
                continue  # the caller has given up
            try:
                result = change.function()
            except Exception as error:
                change.done.set_exception(error)
            else:
                change.done.set_result(result)
        self._release(listener)

    def _release(self, listener: Listener) -> None:
        """Add the held requests, unless something still holds them."""
        if self._paused or self._changes:
            return
        held, self._held = self._held, []
        for ready in held:
            self._add(ready, listener)

    def _control(self, control: Control, listener: Listener) -> None:
        """Execute a command that a ``Controlled`` answers, now or once the engine is idle."""
        done: Future[None] = Future()
        done.add_done_callback(lambda ended: listener(_controlled(control.number, ended)))
        aborts = control.mode == "abort"
        match control.action:
            case "reset_prefix_cache":
                self._put_change(_Change(self._engine.reset_prefix_cache, aborts, done))
            case "pause":
                self._put_change(_Change(self._pause, aborts, done))
            case "resume":
                self._paused = False
                self._release(listener)
                done.set_result(None)
            case "update_weights":  # they are read while requests run
                arguments = (control.path, aborts, done)
                threading.Thread(target=self._load, args=arguments, daemon=True).start()

    def _pause(self) -> None:
        self._paused = True

    def _load(self, path: str, aborts: bool, done: Future[None]) -> None:
        try:
            prepared = self._engine.weights.prepared(path)
        except Exception as error:
            done.set_exception(error)
            return
        self._put_change(_Change(lambda: self._engine.replace_weights(prepared), aborts, done))

    def _fail_changes(self, error: EngineError) -> None:
        """Fail the changes that were not made, since the engine has ended."""
        with suppress(Empty):
            while True:
                command = self._inbox.get(block=False)
                if isinstance(command, _Change):
                    self._changes.append(command)
        while self._changes:
            done = self._changes.pop().done
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

    def _compile(self, submission: Submission) -> None:
        """Compile a request's constraint on another thread, as that may take seconds."""
        self._compiling.add(submission.request_id)
        compiled = self._compilers.submit(self._engine.constraints.compile, submission.sampling)
        compiled.add_done_callback(lambda done: self._inbox.put(_Compiled(submission, done)))

    def _take_compiled(self, compiled: _Compiled, listener: Listener) -> None:
        """Add a request whose constraint is compiled, unless it was aborted meanwhile."""
        submission, done = compiled
        if submission.request_id not in self._compiling:
            return
        self._compiling.remove(submission.request_id)
        if (error := done.exception()) is not None:
            listener(Refused(submission.request_id, Failed.of(_refusal(error))))
            return
        self._add_or_hold(_Ready(submission, done.result()), listener)

    def _add_or_hold(self, ready: _Ready, listener: Listener) -> None:
        if self._changes or self._paused:
            self._held.append(ready)
        else:
            self._add(ready, listener)

    def _add(self, ready: _Ready, listener: Listener) -> None:
        submission = ready.submission
        try:
            self._engine.add_request(
                submission.request_id,
                submission.prompt_token_ids,
                submission.sampling,
                priority=submission.priority,
                cache_salt=submission.cache_salt,
                constraint=ready.constraint,
            )
        except Exception as error:  # an error of one request must not stop the others
            listener(Refused(submission.request_id, Failed.of(_refusal(error))))


def _refusal(error: BaseException) -> JaxinferError:
    """The error of a request that cannot be added."""
    if isinstance(error, JaxinferError):
        return error
    return RequestError(f"the request is unusable: {error}")


def _controlled(number: int, ended: Future[None]) -> Controlled:
    """The answer to a ``Control`` whose future has ended."""
    error = ended.exception()
    if error is not None and not isinstance(error, JaxinferError):
        error = EngineError(f"the change failed ({type(error).__name__}: {error})")
    return Controlled(number, None if error is None else Failed.of(error))
