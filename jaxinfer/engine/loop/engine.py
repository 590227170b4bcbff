"""The engine: validated requests in, deltas out. Drives the loop; one thread at a time.

Owns: the seeds of unseeded requests, the n sequences of a request, late-compile watching, counters.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.request import FinishReason, Request, SamplingParams, check_identity
from jaxinfer.core.step import Abort, Arrive, Event, TokenEvent
from jaxinfer.engine.facts import (
    CheckedRequest,
    ModelFacts,
    check_request,
    resolved_max_tokens,
)
from jaxinfer.engine.loop.late_compiles import LateCompiles
from jaxinfer.engine.loop.loop import LOGGER, EngineLoop, StepExecutor
from jaxinfer.engine.loop.processor import SequenceProcessor
from jaxinfer.engine.loop.timeline import Timeline
from jaxinfer.engine.news import EngineStats, News
from jaxinfer.engine.outputs import Delta

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


class Engine:
    """Requests in, deltas out. Build one with ``engine.start.build.build_engine``."""

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
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.tokenizer = tokenizer
        self._loop = EngineLoop(executor, limits, overlap=overlap)
        self._seed = seed
        self._start = start or EngineStats()
        self._counters = Counter[str]()
        self._arrivals = 0
        self._pending: list[Event] = []
        # the scheduler knows a sequence by a number that is never used again, so that news of an
        # ended one can never be taken for news of a later request of the same name
        self._sequences: dict[str, SequenceProcessor] = {}
        self._children: dict[str, tuple[str, ...]] = {}  # unfinished sequences of each request
        self._timeline = Timeline()
        self._late_compiles = LateCompiles()
        self._failure: EngineError | None = None

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self._failure is None and bool(self._pending or not self._loop.idle)

    def check(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        pools: bool = False,
    ) -> CheckedRequest:
        """The request as ``add_checked`` takes it; raises ``RequestError`` for one that this engine
        can never answer. One that ``pools`` yields its last token's hidden state.
        """
        if pools and not self.limits.pools:
            raise RequestError("this engine was not built to pool; generate text with it instead")
        priority, salt = check_identity(priority, cache_salt)
        prompt = check_request(
            prompt_token_ids,
            sampling,
            limits=self.limits,
            facts=self.facts,
            has_tokenizer=self.tokenizer is not None,
        )
        return CheckedRequest(prompt, sampling, priority, salt, pools)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        pools: bool = False,
    ) -> None:
        """Accept a request; raises ``RequestError`` before anything of it has begun."""
        self._refuse_now(request_id)
        checked = self.check(
            prompt_token_ids, sampling, priority=priority, cache_salt=cache_salt, pools=pools
        )
        self.add_checked(request_id, checked)

    def add_checked(self, request_id: str, checked: CheckedRequest) -> None:
        """Accept what ``check`` let pass."""
        self._refuse_now(request_id)
        requests = [self._request(checked, index) for index in range(checked.sampling.n)]
        for index, request in enumerate(requests):
            self._sequences[request.request_id] = SequenceProcessor(
                request, request_id, index, self.tokenizer
            )
            self._pending.append(Arrive(request))
        children = tuple([request.request_id for request in requests])
        self._arrivals += len(children)
        self._children[request_id] = children
        self._timeline.arrive(children)
        self._counters["num_requests"] += 1
        self._counters["num_prompt_tokens"] += len(checked.prompt_token_ids) * len(children)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free after the next step. Unknown ids are ignored."""
        self._pending += [Abort(child) for child in self._children.get(request_id, ())]

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
            num_waiting=state.num_waiting,
            num_live_pages=self.limits.num_usable_pages - num_free,
            num_live_pages_of_groups=state.pages.num_live,
            num_cached_pages=state.pages.num_cached,
            num_fresh_pages=num_free - state.pages.num_cached,
            **self._counters,
        )

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
        delta = _delta_of(sequence, event)
        if event.token_ids or event.pooled is not None:
            if self._timeline.token(event.request_id):
                self._counters["num_prefilled_tokens"] += sequence.num_prompt_tokens
                self._counters["num_cached_tokens"] += delta.num_cached_tokens
            self._counters["num_generated_tokens"] += len(delta.token_ids)
        if delta.finish_reason is not None and event.finish_reason is None:
            self._pending.append(Abort(event.request_id, delta.finish_reason))
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
            max_tokens=1
            if checked.pools
            else resolved_max_tokens(len(prompt), sampling, self.limits),
            seed=self._seed_of(sampling, index, arrival),
            eos_token_ids=() if sampling.ignore_eos else self.facts.eos_token_ids,
            arrival=arrival,
            priority=checked.priority,
            cache_salt=checked.cache_salt,
            pools=checked.pools,
        )

    def _seed_of(self, sampling: SamplingParams, index: int, arrival: int) -> int:
        """The user's seed for the first sequence; others, and unseeded requests, get their own."""
        if sampling.seed is None:
            return _mix(self._seed, arrival)
        return sampling.seed if index == 0 else _mix(sampling.seed, index)


def _delta_of(sequence: SequenceProcessor, event: TokenEvent) -> Delta:
    """What an event says to its reader; where its text cannot be made, this sequence ends alone."""
    try:
        return sequence.process(event)
    except Exception as error:
        logging.getLogger(LOGGER).exception("request %s", sequence.parent_id)
        return Delta(
            request_id=sequence.parent_id,
            index=sequence.index,
            finish_reason=FinishReason.ERROR,
            error=f"the text of the answer cannot be made: {error}",
        )


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele et al., OOPSLA 2014): distinct, unrelated seeds from a counter."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    z = (seed + (index + 1) * 0x9E37_79B9_7F4A_7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D0_49BB_1331_11EB) & mask
    return z ^ z >> 31
