"""Several engines with the same weights behind one link, each in a process of its own.

A request goes to one of them (``Router``); what changes engines goes to all. A replica whose
process ends is started again: its open requests end with an error that says so, the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from msgspec.structs import replace

from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.routing import Router
from jaxinfer.engine.link.wire import (
    AbortRequest,
    Answer,
    Command,
    Control,
    Controlled,
    EngineState,
    Failed,
    Listener,
    Ping,
    Pong,
    Refused,
    SetSteering,
    Stop,
    Submission,
)
from jaxinfer.engine.requests.news import EngineStats, News

LOGGER = "jaxinfer.engine"
START_AGAIN_SECONDS = (0.0, 1.0, 10.0)  # waits before each attempt; after the last it is given up
SILENT_SECONDS = 1.0  # without an answer to a ping, for a replica to count as stalled

type StartReplica = Callable[[int], Link]  # by rank; it waits until the engine is ready


@dataclass
class _Open:
    """A request that a replica has, until all its sequences have ended."""

    rank: int
    num_unfinished: int
    num_tokens: int


@dataclass
class _Pending:
    """A command to all replicas, until each has answered."""

    command: Control | SetSteering
    waits_for: set[int]  # ranks
    states: dict[int, EngineState]
    failure: Failed | None = None
    has_effect: bool = False  # a replica has executed it


class Replicas(Link):
    """A link to engines that ``start`` makes; rank 0 is ready already.

    The others are started one after the other once rank 0 is ready, as they read from the cache
    what it has compiled. Raises the error of a replica that cannot be started.
    """

    def __init__(self, first: Link, count: int, start: StartReplica) -> None:
        self.limits, self.facts = first.limits, first.facts
        self.tokenizer, self.stats = first.tokenizer, first.stats
        self._start = start
        links = [first]
        try:
            for rank in range(1, count):
                links.append(self._alike(start(rank), rank))
        except BaseException:
            for link in links:
                link.stop()
            raise
        self._links: dict[int, Link] = dict(enumerate(links))  # those that answer, by rank
        self._start_stats = tuple(link.stats for link in links)
        self._router = Router(count)
        self._open: dict[str, _Open] = {}
        self._forms: dict[int, StructuredOutputsParams | None] = {}  # the last one sent, by rank
        self._last_form: StructuredOutputsParams | None = None
        self._pending: dict[int, _Pending] = {}
        self._lasting: dict[str, Control | SetSteering] = {}  # that a new replica has to follow
        self._joining: dict[int, SimpleQueue[Controlled | Failed]] = {}  # answers, by rank
        self._pings = dict.fromkeys(range(count), (0.0, 0.0))  # sent when, unless answered; stalled
        self._pinged = False  # a ping of the client waits for its answer
        self._listener: Listener | None = None
        self._lock = threading.RLock()
        self._stopping = threading.Event()

    def _alike(self, link: Link, rank: int) -> Link:
        """The link, whose engine must serve what the first one serves."""
        same = ("max_model_len", "max_num_seqs", "groups", "points", "pooling")
        for name in same:
            own, first = getattr(link.limits, name), getattr(self.limits, name)
            if own != first:
                link.stop()
                raise EngineError(
                    f"replica {rank} has {name} {own} and replica 0 {first}; give each replica a "
                    "device of the same kind with as much free memory, or set this number"
                )
        return link

    @property
    def num_replicas(self) -> int:
        """See ``Link``."""
        return self._router.count

    @property
    def start_stats(self) -> tuple[EngineStats, ...]:
        """See ``Link``."""
        return self._start_stats

    def connect(self, listener: Listener) -> None:
        """See ``Link``."""
        self._listener = listener
        for rank, link in tuple(self._links.items()):
            link.connect(partial(self._take, rank, listener))

    def stop(self) -> None:
        """See ``Link``."""
        self._stopping.set()
        with self._lock:
            self._ended = self._ended or EngineError("the engine is shut down; build a new one")
            links = tuple(self._links.values())
            for answers in self._joining.values():
                answers.put(Failed.of(self._ended))
        stopping = [threading.Thread(target=link.stop) for link in links]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        if self._listener is not None:
            self._listener(Failed.of(self._ended))

    def _pass(self, command: Command) -> None:
        with self._lock:
            match command:
                case Submission():
                    self._submit(command)
                case AbortRequest(request_id):
                    if (opened := self._open.pop(request_id, None)) is not None:
                        self._router.ended(opened.rank, opened.num_tokens)
                        self._links[opened.rank].send(command)
                case Control() | SetSteering():
                    self._send_to_all(command)
                case Ping():
                    self._ping()
                case Stop():
                    raise AssertionError("a link is stopped by its method")

    def _submit(self, submission: Submission) -> None:
        if submission.has_last_form:
            submission = submission.with_form(self._last_form)
        spec = submission.spec
        tokens = spec.prompt_token_ids
        # of one that has just ended the last message may not have been read yet
        alive = [rank for rank, link in self._links.items() if link.alive] or [*self._links]
        rank = self._router.choose(tokens, alive)
        form = spec.sampling.structured_outputs
        if form is not None and form is self._forms.get(rank):
            submission = submission.with_form(None)
        self._links[rank].send(submission)
        # as the client does: a form that could not be sent is not the last one
        self._last_form = form or self._last_form
        self._forms[rank] = form or self._forms.get(rank)
        opened = _Open(rank, spec.sampling.n, len(tokens))
        self._open[submission.request_id] = opened
        self._router.began(rank, tokens)

    def _send_to_all(self, command: Control | SetSteering) -> None:
        self._pending[command.number] = _Pending(command, {*self._links}, {})
        for link in self._links.values():
            with suppress(EngineError):  # it has ended, and ``_lose`` follows
                link.send(command)

    def _remember(self, command: Control | SetSteering) -> None:
        """Note what a replica that is started later has to follow."""
        match command:
            case SetSteering(_, name, None):
                self._lasting.pop(f"steering {name}", None)
            case SetSteering(_, name, _):
                self._lasting[f"steering {name}"] = command
            case Control(_, "update_weights" | "pause" | "sleep" as action):
                self._lasting[action] = command
            case Control(_, "resume"):
                self._lasting.pop("pause", None)
            case Control(_, "wake_up"):
                self._lasting.pop("sleep", None)
            case _:
                pass

    def _ping(self) -> None:
        now = time.monotonic()
        self._pinged = True
        for rank, link in self._links.items():
            since, stalled = self._pings[rank]
            if not since:
                self._pings[rank] = (now, stalled)
                with suppress(EngineError):
                    link.send(Ping())
        self._answer_ping()

    def _answer_ping(self) -> None:
        """Answer the client's ping once every replica has told, or has been silent for long."""
        now = time.monotonic()
        silent = [now - self._pings[rank][0] for rank in self._links if self._pings[rank][0]]
        if not self._pinged or any(seconds < SILENT_SECONDS for seconds in silent):
            return
        self._pinged = False
        told = [self._pings[rank][1] for rank in self._links]
        if self._listener is not None:
            self._listener(Pong(max((*silent, *told), default=0.0)))

    # on the threads of the replicas' links

    def _take(self, rank: int, listener: Listener, answer: Answer) -> None:
        with self._lock:
            match answer:
                case Controlled() | Failed() if rank in self._joining:
                    self._joining[rank].put(answer)
                case News():
                    self._count(rank, answer)
                    listener(replace(answer, rank=rank))
                case Refused(request_id, _):
                    if (opened := self._open.pop(request_id, None)) is not None:
                        self._router.ended(rank, opened.num_tokens)
                    listener(answer)
                case Pong(stalled_seconds):
                    self._pings[rank] = (0.0, stalled_seconds)
                    self._answer_ping()
                case Controlled():
                    self._controlled(rank, answer)
                case Failed():
                    self._lose(rank, answer.error, listener)

    def _count(self, rank: int, news: News) -> None:
        for delta in news.deltas:
            opened = self._open.get(delta.request_id)
            if opened is None or delta.finish_reason is None:
                continue
            opened.num_unfinished -= 1
            if not opened.num_unfinished:
                del self._open[delta.request_id]
                self._router.ended(rank, opened.num_tokens)

    def _controlled(self, rank: int, answer: Controlled) -> None:
        pending = self._pending.get(answer.number)
        if pending is None or rank not in pending.waits_for:  # of a replica that follows the others
            return
        pending.waits_for.discard(rank)
        pending.states[rank] = answer.state
        pending.failure = pending.failure or answer.failure
        pending.has_effect = pending.has_effect or answer.failure is None
        self._end_controls()

    def _end_controls(self) -> None:
        """Answer the commands that no replica has to answer any longer."""
        for number, pending in tuple(self._pending.items()):
            if pending.waits_for or self._listener is None:
                continue
            del self._pending[number]
            if pending.has_effect:  # also if another one has ended, which then has to follow
                self._remember(pending.command)
            states = [*pending.states.values()] or [EngineState()]
            state = EngineState(
                any(one.paused for one in states),
                max((one.asleep for one in states), key=len),
                max(one.weight_version for one in states),
            )
            self._listener(Controlled(number, state, pending.failure))

    def _lose(self, rank: int, error: JaxinferError, listener: Listener) -> None:
        """A replica has ended: its requests end, and it is started again, unless all have ended."""
        if self._stopping.is_set() or rank not in self._links:  # it was stopped, and got no request
            return
        del self._links[rank]
        self._forms.pop(rank, None)
        self._pings[rank] = (0.0, 0.0)
        self._router.lost(rank)
        failure = Failed.of(EngineError(f"replica {rank} has ended ({error})"))
        for request_id, opened in tuple(self._open.items()):
            if opened.rank == rank:
                del self._open[request_id]
                listener(Refused(request_id, failure))
        for pending in self._pending.values():
            if rank in pending.waits_for:
                pending.waits_for.discard(rank)
                pending.failure = pending.failure or failure
        self._end_controls()
        listener(News((), (), (), EngineStats(), rank))
        if self._links:
            threading.Thread(target=self._start_again, args=(rank, listener), daemon=True).start()
        else:
            self._ended = EngineError(f"every replica has ended, the last one so: {error}")
            self._stopping.set()
            listener(Failed.of(self._ended))

    def _start_again(self, rank: int, listener: Listener) -> None:
        log = logging.getLogger(LOGGER)
        for wait in START_AGAIN_SECONDS:
            if self._stopping.wait(wait):
                return
            log.warning("replica %d is started again", rank)
            try:
                link = self._alike(self._start(rank), rank)
            except (JaxinferError, OSError) as error:
                log.error("replica %d did not start: %s", rank, error)
                continue
            try:
                self._join(rank, link, listener)
            except JaxinferError as error:
                link.stop()
                if self._stopping.is_set():
                    return
                log.error("replica %d cannot follow the others: %s", rank, error)
                continue
            log.warning("replica %d answers again", rank)
            return
        log.error("replica %d is given up after %d starts", rank, len(START_AGAIN_SECONDS))

    def _join(self, rank: int, link: Link, listener: Listener) -> None:
        """Let a new replica follow the others, and then give it requests.

        It gets none before it has their weights; raises its error if it cannot have them, and
        ``EngineError`` if all are stopped.
        """
        answers, followed = SimpleQueue[Controlled | Failed](), None
        with self._lock:
            self._joining[rank] = answers
        try:
            link.connect(partial(self._take, rank, listener))
            while True:
                with self._lock:
                    if self._ended is not None:
                        raise self._ended
                    newest = self._lasting.get("update_weights")
                    if newest is followed and answers.empty():
                        self._add(rank, link)
                        return
                    if newest is not None and newest is not followed:
                        link.send(newest)
                        followed = newest
                answer = answers.get()
                failure = answer if isinstance(answer, Failed) else answer.failure
                if failure is not None:
                    raise failure.error
        finally:
            with self._lock:
                self._joining.pop(rank, None)

    def _add(self, rank: int, link: Link) -> None:
        """A replica with the weights of the others gets requests, and all else that has lasted."""
        del self._joining[rank]
        self._links[rank] = link
        lasting = [one for key, one in self._lasting.items() if key != "update_weights"]
        for pending in self._pending.values():
            pending.waits_for.add(rank)
            lasting.append(pending.command)
        with suppress(EngineError):  # it has ended, and ``_lose`` follows
            for command in lasting:
                link.send(command)
