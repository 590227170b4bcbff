"""Several engines with the same weights behind one link, each in a process of its own.

A request goes to one of them (``Router``); what changes engines goes to all. A replica whose
process ends is started again: its open requests end with an error that says so, the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.link.lasting import Change, Joining, Lasting
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
FORGETTING = ("reset_prefix_cache", "update_weights", "sleep")  # after these no prefix is left
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

    command: Change
    waits_for: set[int]  # ranks
    states: dict[int, EngineState] = field(default_factory=dict[int, EngineState])
    failures: dict[int, Failed] = field(default_factory=dict[int, Failed])


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
        self._lasting = Lasting()
        self._joining: dict[int, Joining] = {}  # by rank
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
        """See ``Link``; those that answer."""
        return len(self._links)

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
            links = (*self._links.values(), *(one.link for one in self._joining.values()))
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
        rank = self._router.choose(tokens, alive, spec.cache_salt)
        form = spec.sampling.structured_outputs
        if form is not None and form is self._forms.get(rank):
            submission = submission.with_form(None)
        self._links[rank].send(submission)
        # as the client does: a form that could not be sent is not the last one
        self._last_form = form or self._last_form
        self._forms[rank] = form or self._forms.get(rank)
        opened = _Open(rank, spec.sampling.n, len(tokens))
        self._open[submission.request_id] = opened
        self._router.began(rank, tokens, spec.cache_salt)

    def _send_to_all(self, command: Change) -> None:
        self._pending[command.number] = _Pending(command, {*self._links})
        for link in self._links.values():
            with suppress(EngineError):  # it has ended, and ``_lose`` follows
                link.send(command)

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
                case Failed() if (joining := self._joining.get(rank)) is not None:
                    joining.fail(answer.error)
                case Failed() if rank in self._links:
                    self._lose(rank, answer.error, listener)
                case Failed():  # of one that could not join
                    pass

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
        if (joining := self._joining.get(rank)) is not None:
            joining.take(answer)
            self._join(rank)
            return
        pending = self._pending.get(answer.number)
        if pending is None or rank not in pending.waits_for:
            return
        pending.waits_for.discard(rank)
        if answer.failure is None:
            pending.states[rank] = answer.state
        else:
            pending.failures[rank] = answer.failure
        self._end_controls()

    def _end_controls(self) -> None:
        """Answer the commands that no replica has to answer any longer.

        If a part of the replicas could not execute one, these are started again.
        """
        for number, pending in tuple(self._pending.items()):
            if pending.waits_for or self._listener is None:
                continue
            del self._pending[number]
            failed, states = pending.failures, [*pending.states.values()] or [EngineState()]
            state = EngineState(
                any(one.paused for one in states),
                max((one.asleep for one in states), key=len),
                max(one.weight_version for one in states),
            )
            if not pending.states:
                self._listener(Controlled(number, state, next(iter(failed.values()), None)))
                continue
            self._note(pending.command, state)
            self._listener(Controlled(number, state))
            for rank in failed.keys() & self._links.keys():
                self._end(rank, failed[rank].error)
        for rank in tuple(self._joining):
            self._join(rank)

    def _note(self, command: Change, state: EngineState) -> None:
        """Note what replicas that are started again, or are about to join, have to follow."""
        later = self._lasting.note(command, state)
        for joining in self._joining.values():
            joining.commands.append(later)
        if isinstance(command, Control) and command.action in FORGETTING:
            self._router.forget()

    def _end(self, rank: int, error: JaxinferError) -> None:
        """End a replica that is not as the others; ``_lose`` follows."""
        log = logging.getLogger(LOGGER)
        log.error("replica %d is ended, as it could not follow the others: %s", rank, error)
        threading.Thread(target=self._links[rank].stop, daemon=True).start()

    def _lose(self, rank: int, error: JaxinferError, listener: Listener) -> None:
        """A replica has ended: its requests end, and it is started again, unless all have ended."""
        if self._stopping.is_set():
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
                pending.failures[rank] = failure
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
            link: Link | None = None
            try:
                link = self._alike(self._start(rank), rank)
                self._join_in_time(rank, link, listener)
            except JaxinferError as error:
                if link is not None:
                    link.stop()
                if self._stopping.is_set():
                    return
                log.error("replica %d did not start: %s", rank, error)
                continue
            log.warning("replica %d answers again", rank)  # at the level at which its end was told
            return
        log.error("replica %d is given up after %d starts", rank, len(START_AGAIN_SECONDS))

    def _join_in_time(self, rank: int, link: Link, listener: Listener) -> None:
        """Return once the replica has followed the others and gets requests, or raise why not."""
        joining = Joining(link, deque())
        with self._lock:
            if self._stopping.is_set():
                raise EngineError("the engine is shut down; build a new one")
            joining.commands.extend(self._lasting.commands())
            self._joining[rank] = joining
            link.connect(partial(self._take, rank, listener))
            self._join(rank)
        try:
            joining.done.result()
        finally:
            with self._lock:
                self._joining.pop(rank, None)

    def _join(self, rank: int) -> None:
        """Send the next command to a joining replica; after the last it gets requests.

        While a command waits for others, it may still become one that this replica has to follow.
        """
        joining = self._joining[rank]
        if joining.commands:
            joining.send_next()
        elif not (self._pending or joining.done.done()):
            del self._joining[rank]
            self._links[rank] = joining.link
            joining.done.set_result(None)
