"""The engine: validated requests in, deltas out. Drives the loop; one thread at a time.

Owns: request validation against the model, the seeds of unseeded requests, the n sequences of a
request, late-compile watching, counters. Must not know: how it was built, sockets, files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.request import FinishReason, Request, SamplingParams, check_identity
from jaxinfer.core.step import Abort, Arrive, Event, TokenEvent
from jaxinfer.engine.late_compiles import LateCompiles
from jaxinfer.engine.loop import EngineLoop, StepExecutor
from jaxinfer.engine.outputs import Delta
from jaxinfer.engine.processor import SequenceProcessor
from jaxinfer.sched.admit import refusal
from jaxinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingParams  # the model's generation_config over vLLM's defaults


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was built; times in seconds."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_turns: int = 0
    num_preemptions: int = 0
    num_late_compiles: int = 0
    num_compiled: int = 0  # executables compiled at start; the rest came from the bundle
    num_executables: int = 0
    load_seconds: float = 0.0
    compile_seconds: float = 0.0


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
        self._late_compiles = LateCompiles()
        self._failure: EngineError | None = None

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self._failure is None and (bool(self._pending) or not self._loop.idle)

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise ``RequestError`` for a request that this engine can never answer."""
        request = self._request(tuple(prompt_token_ids), sampling, 0)
        if reason := refusal(request, self.limits):
            raise RequestError(reason)
        last = self.facts.vocab_size - 1
        named = {
            "the prompt": request.prompt_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": tuple(sampling.logit_bias or ()),
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if not 0 <= token_id <= last:
                    raise RequestError(
                        f"{name} holds token id {token_id}; the vocabulary ends at {last}"
                    )
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids instead")

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
        if self._failure is not None:
            raise self._failure
        if request_id in self._children:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        priority, salt = check_identity(priority, cache_salt)
        prompt = tuple(prompt_token_ids)
        self.check(prompt, sampling)
        requests = [
            self._request(prompt, sampling, index, priority=priority, cache_salt=salt)
            for index in range(sampling.n)
        ]
        processors = {
            request.request_id: SequenceProcessor(request, request_id, index, self.tokenizer)
            for index, request in enumerate(requests)
        }
        self._arrivals += sampling.n
        self._sequences |= processors
        self._children[request_id] = tuple(processors)
        self._pending += [Arrive(request) for request in requests]
        self._counters["num_requests"] += 1
        self._counters["num_prompt_tokens"] += len(prompt) * sampling.n

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free after the next step. Unknown ids are ignored."""
        for child in self._children.get(request_id, ()):
            self._pending.append(Abort(child))

    @property
    def open_request_ids(self) -> tuple[str, ...]:
        """Requests with an unfinished completion, oldest first."""
        return tuple(self._children)

    def step(self) -> list[Delta]:
        """One turn of the loop: take new requests in, run the device, return what was gained."""
        events, self._pending = tuple(self._pending), []
        try:
            with self._late_compiles.watch():
                news = self._loop.turn(events)
        except Exception as error:  # a lost device, or a bug: nothing can be trusted any more
            self._failure = EngineError(f"the engine stopped: {error}; build a new one")
            raise self._failure from error
        deltas = [delta for event in news if (delta := self._process(event)) is not None]
        self._counters["num_turns"] += 1
        return deltas

    def stats(self) -> EngineStats:
        """Counters so far."""
        return replace(
            self._start,
            num_preemptions=self._loop.state.num_preemptions,
            num_late_compiles=self._late_compiles.count,
            **self._counters,
        )

    def _process(self, event: TokenEvent) -> Delta | None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return None  # ended by a stop string while this token was on its way
        delta = sequence.process(event)
        self._counters["num_generated_tokens"] += len(delta.token_ids)
        if sequence.matched_stop is not None and event.finish_reason is None:
            self._pending.append(Abort(event.request_id, FinishReason.STOP))
        if delta.finish_reason is not None:
            self._counters["num_cached_tokens"] += delta.num_cached_tokens
            self._forget(event.request_id, sequence.parent_id)
        return delta

    def _forget(self, child: str, parent: str) -> None:
        del self._sequences[child]
        left = tuple(other for other in self._children[parent] if other != child)
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]

    def _request(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        index: int,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Sequence ``index`` of the next request."""
        arrival = self._arrivals + index
        room = max(self.limits.max_model_len - len(prompt), 0)
        if index:  # the prompt is scored once
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Request(
            request_id=str(arrival),
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
            seed=self._seed_of(sampling, index, arrival),
            eos_token_ids=() if sampling.ignore_eos else self.facts.eos_token_ids,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _seed_of(self, sampling: SamplingParams, index: int, arrival: int) -> int:
        """The user's seed for the first sequence; others, and unseeded requests, get their own."""
        if sampling.seed is None:
            return _mix(self._seed, arrival)
        return sampling.seed if index == 0 else _mix(sampling.seed, index)


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele et al., OOPSLA 2014): distinct, unrelated seeds from a counter."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    z = (seed + (index + 1) * 0x9E37_79B9_7F4A_7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D0_49BB_1331_11EB) & mask
    return z ^ z >> 31
