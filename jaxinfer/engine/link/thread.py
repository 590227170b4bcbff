"""The engine on its own thread of this process: commands in through an inbox, news out.

Only the thread changes the engine; other threads put commands into the inbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.whole import WholeAnswers
from jaxinfer.engine.link.wire import (
    AbortRequest,
    Command,
    Control,
    Controlled,
    EngineState,
    Failed,
    Listener,
    LoopCommand,
    Mode,
    Ping,
    Pong,
    Refused,
    SetSteering,
    Stop,
    Submission,
)
from jaxinfer.engine.requests.news import News

if TYPE_CHECKING:
    from jaxinfer.engine.loop.engine import Engine
    from jaxinfer.exec.compile.build import LaterExecutables

LOGGER = "jaxinfer.engine"
# While an engine without work saves pages ahead, it looks this often whether a block is saved.
SAVING_SECONDS = 0.5e-3
# An engine without work for so long, after all compiling, prepares for the first form.
IDLE_SECONDS = 1.0


class _Ready(NamedTuple):
    """A submission that can be added to the engine."""

    submission: Submission
    constraint: Constraint | None = None


class _Compiled(NamedTuple):
    """A submission and the future of its constraint, which has been compiled or refused."""

    submission: Submission
    constraint: Future[Any]  # a ``Constraint``


class _Loaded(NamedTuple):
    """Executables that the engine did not have at its start."""

    executables: LaterExecutables


class _Change(NamedTuple):
    """A function that runs between two steps; ``mode``: what becomes of the open requests."""

    function: Callable[[], Any]
    mode: Mode
    done: Future[Any]


class EngineThread(Link):
    """A link that runs an engine from ``connect`` to ``stop``."""

    def __init__(self, engine: Engine) -> None:
        self.limits = engine.limits
        self.facts = engine.facts
        self.tokenizer = engine.tokenizer
        self.stats = engine.stats()
        self._engine = engine
        self._inbox: SimpleQueue[LoopCommand | _Change | _Compiled | _Loaded] = SimpleQueue()
        self._compiling: dict[str, Future[Any]] = {}  # constraints of requests that wait for them
        self._last_form: StructuredOutputsParams | None = None  # of all submissions
        self._changes: list[_Change] = []  # that wait for the engine to become idle
        # that arrived after the first of these, in a pause, or while the engine sleeps
        self._held: list[_Ready] = []
        self._whole = WholeAnswers()
        self._paused = False
        self._idle_seconds: float | None = IDLE_SECONDS  # None: it has been idle for so long
        # when the loop last finished a part of its work, while it has some; read by other threads
        self._progress: float | None = None
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None

    def connect(self, listener: Listener) -> None:
        """See ``Link``."""
        self._listener = listener
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="jaxinfer-engine", daemon=True
        )
        self._thread.start()
        self._engine.load_others(lambda executables: self._inbox.put(_Loaded(executables)))

    def _pass(self, command: Command) -> None:
        if not isinstance(command, Ping):
            self._inbox.put(command)
        elif self._listener is not None:
            progress = self._progress
            stalled = 0.0 if progress is None else time.monotonic() - progress
            self._listener(Pong(stalled))

    def between_steps[T](self, function: Callable[[], T], mode: Mode = "wait") -> Future[T]:
        """Call a function on the engine's thread while no step is in flight.

        Requests that are open now are completed first, aborted, or go on after the function
        (``keep``); later ones wait for the function. Returns a future of its result or exception.
        """
        if self._ended is not None:
            raise self._ended
        done: Future[T] = Future()
        self._put_change(_Change(function, mode, done))
        return done

    def _put_change(self, change: _Change) -> None:
        self._inbox.put(change)
        if self._ended is not None:  # it ended, perhaps without seeing the change
            self._fail_changes(self._ended)

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
                if self._can_step or self._saves_ahead:
                    listener(self._whole.passed(self._engine.step()))
                    self._progress = time.monotonic()
                    self._engine.wait_until_launchable()  # requests that arrive now join it
        except EngineError as failure:  # the engine failed, not one request
            error = failure
        except Exception as failure:  # open requests must not wait for ever
            logging.getLogger(LOGGER).exception("the engine's thread")
            error = EngineError(f"the engine stopped: {failure}; build a new one")
        self._ended = self._ended or error
        try:
            self._engine.close()
        except Exception:
            logging.getLogger(LOGGER).exception("the engine was not closed in full")
        listener(Failed.of(error))
        self._fail_changes(error)

    @property
    def _holds(self) -> bool:
        """True while no request may be started or continued."""
        return self._paused or bool(self._engine.asleep)

    @property
    def _can_step(self) -> bool:
        return self._engine.has_work and not self._holds

    @property
    def _saves_ahead(self) -> bool:
        return self._engine.saves_ahead and not self._holds

    def _take_commands(self, listener: Listener) -> bool:
        """Execute all waiting commands; waits for one if no step can run. False: stop."""
        self._make_changes(listener)
        block, is_compiling = not self._can_step, self._engine.is_compiling
        saves = block and self._saves_ahead
        timeout = None if is_compiling else self._idle_seconds
        timeout = SAVING_SECONDS if saves else timeout
        while True:
            self._progress = None if block else time.monotonic()
            try:
                command = self._inbox.get(block=block, timeout=timeout)
            except Empty:
                self._progress = time.monotonic()
                if block and not saves:
                    self._idle_seconds = None
                    self._engine.constraints.prepare()
                return True
            self._progress = time.monotonic()
            match command:
                case Submission():
                    self._submit(command, listener)
                case _Compiled():
                    self._take_compiled(command, listener)
                case AbortRequest():
                    if (compiled := self._compiling.pop(command.request_id, None)) is not None:
                        compiled.cancel()
                    self._held = [
                        one for one in self._held if one.submission.request_id != command.request_id
                    ]
                    self._engine.abort(command.request_id)
                    self._whole.forget(command.request_id)
                case Control():
                    self._control(command, listener)
                case SetSteering():
                    self._set_steering(command, listener)
                case _Change():
                    self._changes.append(command)
                    self._make_changes(listener)
                case _Loaded(executables):
                    self._engine.add_executables(executables)
                case Stop():
                    return False
            block = False

    def _make_changes(self, listener: Listener) -> None:
        """Make the changes that need not wait any longer, and then add the held requests.

        While no step may run, none waits: requests that are open then have been kept before.
        """
        if not self._changes:
            return
        if any(change.mode == "abort" for change in self._changes):
            self._engine.abort_all()
        if self._engine.has_work:
            if not self._holds and all(change.mode == "wait" for change in self._changes):
                return
            listener(self._whole.passed(self._engine.drain()))
        changes, self._changes = self._changes, []
        for change in changes:
            _run(change)
        listener(News((), (), (), self._engine.stats()))
        self._release(listener)

    def _release(self, listener: Listener) -> None:
        """Add the held requests, unless something still holds them."""
        if self._holds or self._changes:
            return
        held, self._held = self._held, []
        for ready in held:
            self._add(ready, listener)

    def _control(self, control: Control, listener: Listener) -> None:
        """Execute a command that a ``Controlled`` answers, now or once the engine is idle."""
        engine, done = self._engine, Future[None]()
        done.add_done_callback(lambda ended: listener(self._controlled(control.number, ended)))

        def change(function: Callable[[], Any]) -> None:
            self._put_change(_Change(function, control.mode, done))

        match control.action:
            case "reset_prefix_cache":
                change(engine.reset_prefix_cache)
            case "pause":
                change(self._pause)
            case "resume":
                self._paused = False
                self._release(listener)
                done.set_result(None)
            case "sleep":
                change(lambda: engine.sleep(control.level))
            case "wake_up":
                _run(_Change(lambda: engine.wake_up(control.tags), control.mode, done))
                listener(News((), (), (), engine.stats()))
                self._release(listener)
            case "update_weights":  # they are read while requests run
                threading.Thread(target=self._load, args=(control, done), daemon=True).start()
            case "start_profile":  # now, with the steps that are to be seen
                start = partial(engine.profiler.start, Path(control.path), control.num_steps)
                _run(_Change(start, control.mode, done))
            case "stop_profile":
                _run(_Change(engine.profiler.stop, control.mode, done))
            case "report":
                done.set_result(None)

    def _controlled(self, number: int, ended: Future[None]) -> Controlled:
        """The answer to a ``Control`` whose future has ended."""
        error = ended.exception()
        if error is not None and not isinstance(error, JaxinferError):
            error = EngineError(f"the change failed ({type(error).__name__}: {error})")
        state = EngineState(self._paused, self._engine.asleep, self._engine.weight_version)
        return Controlled(number, state, None if error is None else Failed.of(error))

    def _set_steering(self, command: SetSteering, listener: Listener) -> None:
        done = Future[None]()
        done.add_done_callback(lambda ended: listener(self._controlled(command.number, ended)))
        _run(_Change(lambda: self._engine.steering.set(command.name, command.vector), "keep", done))

    def _pause(self) -> None:
        self._paused = True

    def _load(self, control: Control, done: Future[None]) -> None:
        engine = self._engine
        try:
            prepared = engine.weights.prepared(control.path)
        except Exception as error:
            done.set_exception(error)
            return

        def replaced() -> None:
            engine.replace_weights(prepared, control.path)
            engine.weight_version = control.version or engine.weight_version

        self._put_change(_Change(replaced, control.mode, done))

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

    def _submit(self, submission: Submission, listener: Listener) -> None:
        """Add a request, once its constraint is compiled on another thread: that takes up to
        seconds.
        """
        if submission.has_last_form:
            submission = submission.with_form(self._last_form)
        sampling = submission.spec.sampling
        self._last_form = sampling.structured_outputs or self._last_form
        if not sampling.is_constrained:
            self._add_or_hold(_Ready(submission), listener)
            return
        compiled = self._engine.constraints.submit(sampling, submission.client)
        self._compiling[submission.request_id] = compiled
        compiled.add_done_callback(lambda done: self._inbox.put(_Compiled(submission, done)))

    def _take_compiled(self, compiled: _Compiled, listener: Listener) -> None:
        """Add a request whose constraint is compiled, unless it was aborted before."""
        submission, done = compiled
        if self._compiling.pop(submission.request_id, None) is None or done.cancelled():
            return
        if (error := done.exception()) is not None:
            listener(Refused(submission.request_id, Failed.of(_refusal(error))))
            return
        self._add_or_hold(_Ready(submission, done.result()), listener)

    def _add_or_hold(self, ready: _Ready, listener: Listener) -> None:
        if self._changes or self._holds:
            self._held.append(ready)
        else:
            self._add(ready, listener)

    def _add(self, ready: _Ready, listener: Listener) -> None:
        submission = ready.submission
        try:
            self._engine.add_request(submission.request_id, submission.spec, ready.constraint)
        except Exception as error:  # an error of one request must not stop the others
            listener(Refused(submission.request_id, Failed.of(_refusal(error))))
            return
        if submission.is_whole:
            self._whole.add(submission.request_id, submission.spec.sampling.n)


def _refusal(error: BaseException) -> JaxinferError:
    """The error of a request that cannot be added."""
    if isinstance(error, JaxinferError):
        return error
    return RequestError(f"the request is unusable: {error}")


def _run(change: _Change) -> None:
    """Call the function of a change, unless the caller has given up."""
    if not change.done.set_running_or_notify_cancel():
        return
    try:
        result = change.function()
    except Exception as error:
        change.done.set_exception(error)
    else:
        change.done.set_result(result)
