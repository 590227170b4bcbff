"""The engine: validated requests in, deltas out. Drives the loop; one thread at a time.

Owns: request validation against the model, the seeds of unseeded requests, the n sequences of a
request, late-compile watching, counters. Must not know: how it was built, sockets, files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.core.config import Limits
from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import FinishReason, Request, SamplingParams
from jaxinfer.core.step import Abort, Arrive, Event, TokenEvent
from jaxinfer.engine.late_compiles import LateCompiles
from jaxinfer.engine.loop import EngineLoop, StepExecutor
from jaxinfer.engine.outputs import Delta
from jaxinfer.engine.processor import SequenceProcessor
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
        self._sequences: dict[str, SequenceProcessor] = {}
        self._children: dict[str, list[str]] = {}
        self._late_compiles = LateCompiles()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._pending) or not self._loop.idle

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise ``RequestError`` for a request that this engine can never answer."""
        limits, vocab = self.limits, self.facts.vocab_size
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        length = len(prompt_token_ids)
        if length >= limits.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens and the context holds {limits.max_model_len}, "
                "answer included; shorten the prompt"
            )
        named = {
            "the prompt": prompt_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": tuple(sampling.logit_bias or ()),
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if not 0 <= token_id < vocab:
                    raise RequestError(
                        f"{name} holds token id {token_id}; the vocabulary ends at {vocab - 1}"
                    )
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids instead")
        tokens = min(length + self._max_tokens(length, sampling), limits.max_model_len)
        pages = -(-tokens // limits.page_size)
        if pages > limits.num_usable_pages:
            raise RequestError(
                f"the request needs {pages} pages of KV cache and the pool has "
                f"{limits.num_usable_pages}; lower max_tokens or raise num_pages"
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Accept a request; raises ``RequestError`` before anything of it has begun."""
        if request_id in self._children:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        prompt = tuple(int(token_id) for token_id in prompt_token_ids)
        self.check(prompt, sampling)
        children: list[str] = []
        for index in range(sampling.n):
            request = Request(
                request_id=request_id if sampling.n == 1 else f"{request_id}/{index}",
                prompt_token_ids=prompt,
                sampling=sampling,
                max_tokens=self._max_tokens(len(prompt), sampling),
                seed=self._child_seed(sampling, index),
                eos_token_ids=() if sampling.ignore_eos else self.facts.eos_token_ids,
                arrival=self._arrivals,
                priority=priority,
                cache_salt=cache_salt,
            )
            self._arrivals += 1
            processor = SequenceProcessor(request, request_id, index, self.tokenizer)
            self._sequences[request.request_id] = processor
            children.append(request.request_id)
            self._pending.append(Arrive(request))
        self._children[request_id] = children
        self._counters["num_requests"] += 1
        self._counters["num_prompt_tokens"] += len(prompt)

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
        with self._late_compiles.watch():
            news = self._loop.turn(events)
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
        self._children[parent].remove(child)
        if not self._children[parent]:
            del self._children[parent]

    def _max_tokens(self, prompt_tokens: int, sampling: SamplingParams) -> int:
        room = self.limits.max_model_len - prompt_tokens
        return room if sampling.max_tokens is None else min(sampling.max_tokens, room)

    def _child_seed(self, sampling: SamplingParams, index: int) -> int:
        """The user's seed for the first sequence; others, and unseeded requests, get their own."""
        if sampling.seed is None:
            return _mix(self._seed, self._arrivals)
        return sampling.seed if index == 0 else _mix(sampling.seed, index)


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele et al., OOPSLA 2014): distinct, unrelated seeds from a counter."""
    mask = 0xFFFF_FFFF_FFFF_FFFF
    z = (seed + (index + 1) * 0x9E37_79B9_7F4A_7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D0_49BB_1331_11EB) & mask
    return z ^ z >> 31
