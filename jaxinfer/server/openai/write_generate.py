"""Writes the response of ``/v1/generate``, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.answer import Answer, ChoiceUpdate
from jaxinfer.server.openai.responses import Generated, GenerateResponse, encode
from jaxinfer.server.openai.schema import GenerateRequest
from jaxinfer.server.openai.writer import Writer, in_order, merged_updates, usage_of


class GenerateWriter(Writer[GenerateRequest]):
    """An event is a ``GenerateResponse`` with new tokens.

    The first event has the prompt's token ids, the last one the usage.
    """

    _has_begun = False

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> GenerateResponse:
        return self._response(
            in_order(updates),
            usage=usage_of(answer),
            latency_ms=_milliseconds_since(answer.received),
            prompt_logprobs=self._prompt_logprobs_of(updates),
            prompt_token_ids=self._listed(self._prompts[0].token_ids),
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        prompt_token_ids = UNSET if self._has_begun else self._listed(self._prompts[0].token_ids)
        self._has_begun = True
        response = self._response(
            merged_updates(updates),
            usage=usage_of(answer) if self._request.sends_continuous_usage else UNSET,
            prompt_token_ids=prompt_token_ids,
        )
        return frame(encode(response))

    def final_events(self, answer: Answer) -> bytes:
        latency_ms = _milliseconds_since(answer.received)
        return frame(encode(self._response([], usage=usage_of(answer), latency_ms=latency_ms)))

    def _response(self, updates: Sequence[ChoiceUpdate], **fields: Any) -> GenerateResponse:
        outputs = [
            Generated(
                index=update.choice,
                text=update.delta.text,
                token_ids=list(update.delta.token_ids),
                finish_reason=update.delta.finish_reason,
                stop_reason=update.delta.stop_reason,
                logprobs=UNSET if self._request.logprobs is None else list(update.delta.logprobs),
            )
            for update in updates
        ]
        context = self._context
        return GenerateResponse(
            id=context.request_id, model=context.model, outputs=outputs, **fields
        )


def _milliseconds_since(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 3)
