"""The engine: validated requests in, deltas out. Drives the loop; one thread at a time.

Owns: the seeds of unseeded requests, the n sequences of a request, late-compile watching, counters.
Must not know: how it was built, sockets, files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.later import Later
from jaxinfer.core.request import FinishReason, Request, SamplingParams, check_identity
from jaxinfer.core.step import Abort, Arrive, Event, MixedReady, TokenEvent
from jaxinfer.engine.facts import (
    CheckedRequest,
    ModelFacts,
    check_request,
    resolved_max_tokens,
)
from jaxinfer.engine.late_compiles import LateCompiles
from jaxinfer.engine.loop import LOGGER, EngineLoop, StepExecutor
from jaxinfer.engine.news import EngineStats, News
from jaxinfer.engine.outputs import Delta
from jaxinfer.engine.processor import SequenceProcessor
from jaxinfer.engine.timeline import Timeline
from jaxinfer.exec.batch import extras_of

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

HELD_SECONDS = 0.02  # that a turn waits for extras when there is nothing else to do


class Engine:
    """Requests in, deltas out. Build one with ``engine.build.build_engine``."""

    def __init__(
        self,
        executor: StepExecutor[Any],
        limits: Limits,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        overlap: bool = True,
        start: EngineStats | None = None,
        extras: Later[Any] | None = None,
        mixed: Later[Any] | None = None,
    ) -> None:
        """``extras``: what requests that ask for extras have to wait for, if for anything.
        ``mixed``: what there must be before rows may decode beside prompts. Both are begun here, or
        with ``prefill_first`` by the first who has to wait: few batches do.
        """
        self.limits = limits
        self.facts = facts
        self.tokenizer = tokenizer
        self._loop = EngineLoop(executor, limits, overlap=overlap, has_mixed=mixed is None)
        self._seed = seed
        self._start = start or EngineStats()
        self._counters = Counter[str]()
        self._arrivals = 0
        self._pending: list[Event] = []
        self._extras = extras
        self._mixed = mixed  # None once the scheduler knows of it
        self._held: dict[str, list[Event]] = {}  # of each sequence that waits for ``extras``
        # the scheduler knows a sequence by a number that is never used again, so that news of an
        # ended one can never be taken for news of a later request of the same name
        self._sequences: dict[str, SequenceProcessor] = {}
        self._children: dict[str, tuple[str, ...]] = {}  # unfinished sequences of each request
        self._timeline = Timeline()
        self._late_compiles = LateCompiles()
        self._failure: EngineError | None = None
        if not limits.prefill_first:
            self._begin_extras()
            self._begin_mixed()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        waiting = self._pending or self._held or not self._loop.idle
        return self._failure is None and bool(waiting)

    @property
    def has_background_work(self) -> bool:
        """Whether a thread beside it still makes what some requests need; nothing cuts it off."""
        return any(later and later.under_way for later in (self._extras, self._mixed))

    def after_background_work(self, then: Callable[[], object]) -> None:
        """Call ``then`` when the threads beside it are done; now, if none is at work."""
        last = self._mixed or self._extras  # steps that mix may lie in one bundle with those
        if last is not None and last.under_way:
            last.when_done(then)
        else:
            then()

    def check(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> CheckedRequest:
        """The request as ``add_checked`` takes it; raises ``RequestError`` for one that this engine
        can never answer.
        """
        priority, salt = check_identity(priority, cache_salt)
        prompt = check_request(
            prompt_token_ids,
            sampling,
            limits=self.limits,
            facts=self.facts,
            has_tokenizer=self.tokenizer is not None,
        )
        return CheckedRequest(prompt, sampling, priority, salt)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Accept a request; raises ``RequestError`` before anything of it has begun."""
        self._refuse_now(request_id)
        checked = self.check(prompt_token_ids, sampling, priority=priority, cache_salt=cache_salt)
        self.add_checked(request_id, checked)

    def add_checked(self, request_id: str, checked: CheckedRequest) -> None:
        """Accept what ``check`` let pass."""
        self._refuse_now(request_id)
        requests = [self._request(checked, index) for index in range(checked.sampling.n)]
        for index, request in enumerate(requests):
            self._sequences[request.request_id] = SequenceProcessor(
                request, request_id, index, self.tokenizer
            )
            if self._must_wait(request):
                self._begin_extras()
                self._held[request.request_id] = [Arrive(request)]
            else:
                self._pending.append(Arrive(request))
        children = tuple([request.request_id for request in requests])
        self._arrivals += len(children)
        self._children[request_id] = children
        self._timeline.arrive(children)
        self._counters["num_requests"] += 1
        self._counters["num_prompt_tokens"] += len(checked.prompt_token_ids) * len(children)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free after the next step. Unknown ids are ignored."""
        for child in self._children.get(request_id, ()):
            self._held.get(child, self._pending).append(Abort(child))

    @property
    def open_request_ids(self) -> tuple[str, ...]:
        """Requests with an unfinished completion, oldest first."""
        return tuple(self._children)

    def wait_for_room(self) -> None:
        """Return once another step may be launched. Requests that are added after it, not before
        it, are in that step too.
        """
        with self._running():
            if self._loop.wait_for_room():
                self._timeline.step_ended()

    def step(self) -> News:
        """One turn of the loop: take new requests in, run the device, return what was gained."""
        self._look_for_mixed()
        self._release_held()
        events, self._pending = tuple(self._pending), []
        with self._running():
            turn = self._loop.turn(events)
        steps, newly_started = self._timeline.turn(turn)
        started = self._parents_of(newly_started)  # before an event can end one of them
        deltas = [delta for event in turn.events if (delta := self._process(event)) is not None]
        self._counters["num_turns"] += 1
        return News(tuple(deltas), started, steps, self.stats())

    def stats(self) -> EngineStats:
        """Counters so far, and what is held now."""
        state = self._loop.state
        num_free = state.num_free_pages
        return replace(
            self._start,
            num_preemptions=state.num_preemptions,
            num_late_compiles=self._late_compiles.count,
            num_running=state.num_running,
            num_waiting=state.num_waiting + len(self._held),
            num_live_pages=self.limits.num_usable_pages - num_free,
            num_cached_pages=state.pages.num_cached,
            num_fresh_pages=num_free - state.pages.num_cached,
            **self._counters,
        )

    def _begin_extras(self) -> None:
        if self._extras is not None:
            self._extras.begin(_extras_failed)

    def _begin_mixed(self) -> None:
        if self._mixed is not None:
            self._mixed.begin(_mixed_failed)

    def _look_for_mixed(self) -> None:
        """Let rows decode beside prompts as soon as they can."""
        if self._mixed is None:
            return
        if self._mixed.made:
            self._pending.insert(0, MixedReady())
            self._mixed = None
        elif self._loop.state.decodes_waited:
            self._begin_mixed()

    def _must_wait(self, request: Request) -> bool:
        return self._extras is not None and not self._extras.done and any(extras_of((request,)))

    def _release_held(self) -> None:
        """Let those in that have waited for extras, before what is newer. Without other work, wait
        a moment for them.
        """
        if not self._held or self._extras is None:
            return
        if not self._pending and self._loop.idle:
            self._extras.wait(HELD_SECONDS)
        if self._extras.done:
            held = [event for events in self._held.values() for event in events]
            self._pending = [*held, *self._pending]
            self._held = {}

    @contextmanager
    def _running(self) -> Generator[None]:
        """After a lost device, or a bug, nothing can be trusted any more: the engine stops."""
        try:
            with self._late_compiles.watch():
                yield
        except Exception as error:
            self._failure = EngineError(f"the engine stopped: {error}; build a new one")
            logging.getLogger(LOGGER).critical(str(self._failure), exc_info=error)
            raise self._failure from error

    def _parents_of(self, sequences: tuple[str, ...]) -> tuple[str, ...]:
        """The requests whose first sequence is among these."""
        known = (self._sequences.get(child) for child in sequences)
        return tuple(child.parent_id for child in known if child and child.index == 0)

    def _process(self, event: TokenEvent) -> Delta | None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return None  # ended by a stop string while this token was on its way
        delta = sequence.process(event)
        if event.token_ids:
            if self._timeline.token(event.request_id):
                self._counters["num_prefilled_tokens"] += sequence.num_prompt_tokens
                self._counters["num_cached_tokens"] += delta.num_cached_tokens
            self._counters["num_generated_tokens"] += len(delta.token_ids)
        if sequence.matched_stop is not None and event.finish_reason is None:
            self._pending.append(Abort(event.request_id, FinishReason.STOP))
        if delta.finish_reason is not None:
            self._forget(event.request_id, sequence.parent_id)
            return msgspec.structs.replace(delta, times=self._timeline.finish(event.request_id))
        return delta

    def _refuse_now(self, request_id: str) -> None:
        """Raise where, at present, nothing or nothing of this name can be accepted."""
        if self._failure is not None:
            raise self._failure
        if request_id in self._children:
            raise RequestError(f"request id {request_id!r} is in use; choose another")

    def _forget(self, child: str, parent: str) -> None:
        del self._sequences[child]
        left = tuple(other for other in self._children[parent] if other != child)
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]

    def _request(self, checked: CheckedRequest, index: int) -> Request:
        """Sequence ``index`` of the next request."""
        arrival = self._arrivals + index
        prompt, sampling = checked.prompt_token_ids, checked.sampling
        if index and sampling.prompt_logprobs is not None:  # the prompt is scored once
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Request(
            request_id=str(arrival),
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=resolved_max_tokens(len(prompt), sampling, self.limits),
            seed=self._seed_of(sampling, index, arrival),
            eos_token_ids=() if sampling.ignore_eos else self.facts.eos_token_ids,
            arrival=arrival,
            priority=checked.priority,
            cache_salt=checked.cache_salt,
        )

    def _seed_of(self, sampling: SamplingParams, index: int, arrival: int) -> int:
        """The user's seed for the first sequence; others, and unseeded requests, get their own."""
        if sampling.seed is None:
            return _mix(self._seed, arrival)
        return sampling.seed if index == 0 else _mix(sampling.seed, index)


def _extras_failed(error: BaseException) -> None:
    logging.getLogger(LOGGER).error(
        "requests for logprobs, penalties, logit_bias and min_tokens will fail: %s", error
    )


def _mixed_failed(error: BaseException) -> None:
    logging.getLogger(LOGGER).error(
        "prompts and rows that decode keep taking turns, which is slower: %s", error
    )


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele et al., OOPSLA 2014): distinct, unrelated seeds from a counter."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    z = (seed + (index + 1) * 0x9E37_79B9_7F4A_7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D0_49BB_1331_11EB) & mask
    return z ^ z >> 31
