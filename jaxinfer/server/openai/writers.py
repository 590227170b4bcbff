"""The writers of ``/v1/completions`` and ``/v1/generate``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta, PositionLogprobs
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.answer import Answer, ChoiceUpdate
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    Generated,
    GenerateResponse,
    TokensChoice,
    TokensResponse,
    Usage,
    WeightVersion,
    encode,
)
from jaxinfer.server.openai.schema import (
    CompletionRequest,
    GenerateRequest,
    TokenSamplingParams,
)
from jaxinfer.server.openai.writer import (
    Echo,
    EnvelopeWriter,
    ResponseContext,
    TextOffsets,
    Writer,
    chat_logprobs,
    completion_logprobs,
    in_order,
    merged_updates,
    usage_of,
)


class CompletionWriter(EnvelopeWriter[CompletionRequest]):
    """With ``echo`` a choice's text begins with its prompt."""

    _id_prefix = "cmpl"
    _chunk_type = CompletionChunk

    def __init__(
        self, context: ResponseContext, request: CompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        super().__init__(context, request, prompts)
        self._offsets: dict[int, TextOffsets] = {}  # of each choice's tokens, for logprobs
        self._echo = cache(self._echo_of)  # of each prompt, made with its first choice
        # of each prompt, as far as they have arrived; a prompt's first token has none
        self._prompt_logprobs: list[list[PositionLogprobs | None]] = [[None] for _ in prompts]
        self._held: list[ChoiceUpdate] = []  # updates that cannot be written yet

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> Completion:
        updates = self._noted(updates)
        return Completion(
            **self._head,
            choices=[self._choice(update) for update in in_order(updates)],
            usage=self._usage(answer),
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        sent: list[bytes] = []
        envelope = self._envelope_with(self._running_usage(answer))
        updates, self._held = [*self._held, *self._noted(updates)], []
        for update in merged_updates(updates):
            if not self._is_writable(update):
                self._held.append(update)
                continue
            if update.delta.token_ids or update.delta.finish_reason is not None:
                sent.append(envelope.around(self._chunk_choice(update)))
        return b"".join(sent)

    def _choice(self, update: ChoiceUpdate) -> CompletionChoice:
        assert update.delta.finish_reason is not None, "the answer has ended"
        has_prompt_logprobs = self._request.prompt_logprobs is not None
        return CompletionChoice(
            **asdict(self._chunk_choice(update)),
            prompt_logprobs=self._prompt_logprobs[update.prompt] if has_prompt_logprobs else UNSET,
            taps=self._taps(update.delta),
        )

    def _chunk_choice(self, update: ChoiceUpdate) -> CompletionChunkChoice:
        delta, prompt = update.delta, self._prompts[update.prompt]
        first = update.choice not in self._begun
        self._begun.add(update.choice)
        return CompletionChunkChoice(
            index=update.choice,
            text=self._echo(update.prompt).text + delta.text if first else delta.text,
            logprobs=self._logprobs(update, first=first),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._listed(delta.token_ids),
            prompt_token_ids=self._listed(prompt.token_ids) if first else UNSET,
        )

    def _echo_of(self, number: int) -> Echo:
        """The text that the choices of a prompt begin with."""
        prompt = self._prompts[number]
        if not self._request.echo:
            return Echo()
        if prompt.text is not None:
            return Echo(prompt.text, prompt.offsets)
        if self._context.tokenizer is None:
            return Echo("", [0] * len(prompt.token_ids))
        detokenizer = self._context.tokenizer.detokenizer(
            skip_special_tokens=self._request.skip_special_tokens
        )
        text, offsets = detokenizer.push_with_offsets(prompt.token_ids)
        # token ids may end within a character; the output's text then begins with the whole
        # character
        return Echo(text + detokenizer.flush() if self._request.scores_only else text, offsets)

    def _logprobs(self, update: ChoiceUpdate, *, first: bool) -> CompletionLogprobs | None:
        top = self._request.logprobs
        if top is None:
            return None
        token_ids = update.delta.token_ids
        positions: tuple[PositionLogprobs | None, ...] = update.delta.logprobs
        if first and self._request.echo:
            prompt = self._prompts[update.prompt]
            scored = self._prompt_logprobs[update.prompt]
            unscored = [None] * (len(prompt.token_ids) - len(scored))  # of an aborted prompt
            token_ids = prompt.token_ids + token_ids
            positions = (*scored, *unscored, *positions)
        offsets = self._offsets[update.choice].take()
        return completion_logprobs(self._context, token_ids, positions, top, offsets)

    def _noted(self, updates: Sequence[ChoiceUpdate]) -> Sequence[ChoiceUpdate]:
        """The updates for the client.

        The prompt's logprobs and the tokens' offsets are stored for later events.
        """
        if self._request.scores_only:
            updates = [update._replace(delta=_without_output(update.delta)) for update in updates]
        for update in updates:
            self._prompt_logprobs[update.prompt].extend(update.delta.prompt_logprobs)
            if self._request.logprobs is None:
                continue
            if update.choice not in self._offsets:
                self._offsets[update.choice] = TextOffsets(
                    self._context,
                    self._prompts[update.prompt],
                    self._echo(update.prompt),
                    skip_special=self._request.skip_special_tokens,
                )
            self._offsets[update.choice].add(update.delta.text, update.delta.token_ids)
        return updates

    def _is_writable(self, update: ChoiceUpdate) -> bool:
        """True if the prompt's logprobs (for echo) and the offsets of the new tokens are known."""
        if self._request.logprobs is None:
            return True
        if self._request.echo:
            known = len(self._prompt_logprobs[update.prompt])
            if known < len(self._prompts[update.prompt].token_ids):
                return update.delta.finish_reason is FinishReason.ABORT
        return update.delta.finish_reason is not None or self._offsets[update.choice].known

    def _usage(self, answer: Answer) -> Usage:
        return usage_of(answer, counts_output=not self._request.scores_only)


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
                taps=self._taps(update.delta),
            )
            for update in updates
        ]
        context = self._context
        return GenerateResponse(
            id=context.request_id, model=context.model, outputs=outputs, **fields
        )


class TokensWriter(Writer[TokenSamplingParams]):
    """Writes token ids without text, in vLLM's form."""

    def __init__(
        self, context: ResponseContext, request: TokenSamplingParams, prompts: Sequence[Prompt]
    ) -> None:
        context = dataclasses.replace(context, tokens_as_ids=True, tokenizer=None)
        super().__init__(context, request, prompts)

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> TokensResponse:
        prompt_logprobs = self._prompt_logprobs_of(updates)
        return TokensResponse(
            request_id=self._context.request_id,
            choices=[self._choice(update) for update in in_order(updates)],
            prompt_logprobs=None if prompt_logprobs is UNSET else prompt_logprobs,
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        usage = usage_of(answer) if self._request.sends_continuous_usage else UNSET
        choices = [self._choice(update) for update in merged_updates(updates)]
        return self._event(choices, usage)

    def final_events(self, answer: Answer) -> bytes:
        return self._event([], usage_of(answer)) if self._context.sends_usage else b""

    def _event(self, choices: list[TokensChoice], usage: Usage | UnsetType) -> bytes:
        response = TokensResponse(request_id=self._context.request_id, choices=choices, usage=usage)
        return frame(encode(response))

    def _choice(self, update: ChoiceUpdate) -> TokensChoice:
        delta, logprobs = update.delta, None
        if (top := self._request.logprobs) is not None:
            logprobs = chat_logprobs(self._context, delta.token_ids, delta.logprobs, top)
        return TokensChoice(
            index=update.choice,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids),
            weight_versions=[
                WeightVersion(version=span.version, start=span.start, end=span.end)
                for span in delta.weight_versions
            ],
            taps=self._taps(delta),
        )


def _without_output(delta: Delta) -> Delta:
    """The delta of a request that only scores its prompt, without the generated token."""
    ending = delta.finish_reason, delta.stop_reason
    if delta.finish_reason is FinishReason.STOP:
        ending = FinishReason.LENGTH, None  # the token happened to end the text
    return replace(
        delta, text="", token_ids=(), logprobs=(), finish_reason=ending[0], stop_reason=ending[1]
    )


def _milliseconds_since(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 3)
