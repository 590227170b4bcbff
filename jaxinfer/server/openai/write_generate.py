"""Writes the response of ``/v1/generate``, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxinfer.engine.outputs import PositionLogprobs
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.answer import Answer, ChoiceUpdate
from jaxinfer.server.openai.responses import Generated, GenerateResponse, Usage, encode
from jaxinfer.server.openai.schema import GenerateRequest
from jaxinfer.server.openai.writer import ResponseContext, merged_updates, usage_of


class GenerateWriter:
    """See ``Writer``. An event is a ``GenerateResponse`` with new tokens.

    The first event has the prompt's token ids, the last one the usage.
    """

    def __init__(
        self, context: ResponseContext, request: GenerateRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._context = context
        self._request = request
        self._prompt = prompts[0]
        self._has_begun = False

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> GenerateResponse:
        """See ``Writer``."""
        positions: list[PositionLogprobs | None] = [None]
        positions += [one for update in updates for one in update.delta.prompt_logprobs]
        outputs = sorted(
            map(self._output, merged_updates(updates)), key=lambda output: output.index
        )
        return self._response(
            outputs,
            usage=usage_of(answer),
            latency_ms=_milliseconds_since(answer.received),
            prompt_logprobs=UNSET if self._request.prompt_logprobs is None else positions,
            prompt_token_ids=self._prompt_token_ids(),
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        """See ``Writer``."""
        outputs = [self._output(update) for update in merged_updates(updates)]
        usage = usage_of(answer) if self._request.sends_continuous_usage else UNSET
        prompt_token_ids = UNSET if self._has_begun else self._prompt_token_ids()
        self._has_begun = True
        response = self._response(outputs, usage=usage, prompt_token_ids=prompt_token_ids)
        return frame(encode(response))

    def final_events(self, answer: Answer) -> bytes:
        """See ``Writer``."""
        latency_ms = _milliseconds_since(answer.received)
        return frame(encode(self._response([], usage=usage_of(answer), latency_ms=latency_ms)))

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._prompt.token_ids) if self._request.return_token_ids else UNSET

    def _output(self, update: ChoiceUpdate) -> Generated:
        delta = update.delta
        return Generated(
            index=update.choice,
            text=delta.text,
            token_ids=list(delta.token_ids),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=UNSET if self._request.logprobs is None else list(delta.logprobs),
        )

    def _response(
        self,
        outputs: list[Generated],
        *,
        usage: Usage | UnsetType,
        latency_ms: float | UnsetType = UNSET,
        prompt_logprobs: list[PositionLogprobs | None] | UnsetType = UNSET,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> GenerateResponse:
        return GenerateResponse(
            id=self._context.request_id,
            model=self._context.model,
            outputs=outputs,
            usage=usage,
            latency_ms=latency_ms,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=prompt_token_ids,
        )


def _milliseconds_since(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 3)
