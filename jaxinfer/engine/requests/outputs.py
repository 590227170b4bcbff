"""Outputs of requests under vLLM's names: ``RequestOutput``, its parts, and deltas of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.points import Point
from jaxinfer.core.request import FinishReason, SamplingParams
from jaxinfer.core.step import NO_TAPS
from jaxinfer.engine.requests.points import tapped
from jaxinfer.engine.requests.prompts import Prompt


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One token's logprob under the unmodified distribution; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


type PositionLogprobs = dict[int, Logprob]  # the chosen token first, then by rank


class WeightSpan(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens [start, end) of a completion were drawn with weights of this version: the number of
    ``update_weights`` before them.
    """

    version: int
    start: int
    end: int


def joined_spans(spans: Iterable[WeightSpan]) -> list[WeightSpan]:
    """Spans in order, adjacent ones of the same version joined."""
    found: list[WeightSpan] = []
    for span in spans:
        if found and found[-1].version == span.version:
            span = WeightSpan(span.version, found.pop().start, span.end)
        found.append(span)
    return found


class SequenceTimes(msgspec.Struct, frozen=True, gc=False):
    """The times of one sequence, in seconds of ``time.monotonic``; 0 until they are known."""

    arrived: float
    started: float = 0.0  # its first step was launched
    first_token: float = 0.0
    finished: float = 0.0
    num_preemptions: int = 0


class Delta(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The new output of one completion since its last delta.

    ``finish_reason`` and ``times`` are set once, at the end; a completion that ended before its
    first token has no times.
    """

    request_id: str
    index: int  # of the completion, below the request's n
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or the user's stop id that ended it
    pooled: bytes = b""  # float32[D]: the vector of a request that pools
    taps: memoryview = NO_TAPS  # of newly computed tokens: see ``core.step.RowOutput``
    error: str = ""
    is_request_error: bool = False  # what the request asks for is to blame, not the engine
    times: SequenceTimes | None = None
    weight_versions: tuple[WeightSpan, ...] = ()  # of ``token_ids``

    def failure(self, where: str = "") -> RequestError | EngineError:
        """``error`` as an exception; ``where`` comes before its words."""
        kind = RequestError if self.is_request_error else EngineError
        return kind(where + self.error)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Merge deltas of one completion, given in order, into one."""
    if len(deltas) == 1:
        return deltas[0]
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        prompt_logprobs=tuple(chain.from_iterable(delta.prompt_logprobs for delta in deltas)),
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
        taps=memoryview(b"".join(delta.taps for delta in deltas)),
        weight_versions=tuple(
            joined_spans(chain.from_iterable(delta.weight_versions for delta in deltas))
        ),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    ``taps`` is set when it has ended: for each of ``SamplingParams.taps`` the activations of all
    tokens of prompt and completion but the last one, for which nothing is computed.
    ``weight_versions``: of its tokens, one span unless the weights changed while it was generated.
    ``times`` is set when it has ended, unless it has no token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    taps: dict[str, np.ndarray] | None = None  # [tokens, ...] each, in the model's dtype
    weight_versions: list[WeightSpan] = field(default_factory=list[WeightSpan])
    times: SequenceTimes | None = field(default=None, compare=False)

    def finished(self) -> bool:
        """True if it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. ``prompt_logprobs`` starts with None: nothing precedes it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


class Collector:
    """Builds one ``RequestOutput`` from deltas."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        points: Sequence[Point] = (),  # of the engine
    ) -> None:
        scored = sampling.logprobs is not None
        completions = [
            CompletionOutput(
                index, logprobs=[] if scored else None, cumulative_logprob=0.0 if scored else None
            )
            for index in range(sampling.n)
        ]
        token_ids = list(prompt.token_ids)
        self.output = RequestOutput(request_id, prompt.text, token_ids, completions)
        if sampling.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None]
        self._names, self._points = sampling.taps, points
        self._taps: list[list[memoryview]] = [[] for _ in completions]

    def add(self, delta: Delta) -> None:
        """Add one delta."""
        output, completion = self.output, self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if delta.weight_versions:
            last = completion.weight_versions[-1:]
            completion.weight_versions[-1:] = joined_spans((*last, *delta.weight_versions))
        if completion.logprobs is not None:
            completion.logprobs.extend(delta.logprobs)
            gained = sum(
                position[token_id].logprob
                for position, token_id in zip(delta.logprobs, delta.token_ids, strict=False)
            )
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + gained
        if output.prompt_logprobs is not None and delta.index == 0:
            output.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.index == 0:
            output.num_cached_tokens = delta.num_cached_tokens
        if self._names:
            self._taps[delta.index].append(delta.taps)
        if delta.finish_reason is not None:
            if self._names:
                data = b"".join(self._taps[delta.index])
                completion.taps = tapped(data, self._names, self._points)
            completion.finish_reason = delta.finish_reason.value
            completion.stop_reason = delta.stop_reason
            completion.times = delta.times
            output.finished = all(completion.finished() for completion in output.outputs)
