"""Writes the response of ``/v1/chat/completions``, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxinfer.engine.outputs import Delta, PositionLogprobs
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.answer import Answer, ChoiceUpdate
from jaxinfer.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
    encode,
)
from jaxinfer.server.openai.schema import ChatCompletionRequest
from jaxinfer.server.openai.writer import (
    Envelope,
    ResponseContext,
    chat_logprobs,
    merged_updates,
    usage_of,
)


class ChatWriter:
    """See ``Writer``. A choice has an event for its role, events for its text, and a last event."""

    def __init__(
        self, context: ResponseContext, request: ChatCompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._context = context
        self._request = request
        self._prompt = prompts[0]
        self._id = f"chatcmpl-{context.request_id}"
        self._begun: set[int] = set()
        self._envelope = Envelope(self._chunk(None if context.sends_usage else UNSET))

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> ChatCompletion:
        """See ``Writer``."""
        choices = [self._choice(update) for update in merged_updates(updates)]
        scored = self._request.prompt_logprobs is not None
        positions: list[PositionLogprobs | None] = [None]
        positions += [one for update in updates for one in update.delta.prompt_logprobs]
        return ChatCompletion(
            id=self._id,
            created=self._context.created,
            model=self._context.model,
            choices=sorted(choices, key=lambda choice: choice.index),
            system_fingerprint=self._context.fingerprint,
            usage=usage_of(answer),
            prompt_logprobs=positions if scored else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        """See ``Writer``."""
        usage = self._running_usage(answer)
        envelope = Envelope(self._chunk(usage)) if isinstance(usage, Usage) else self._envelope
        sent: list[bytes] = []
        for update in merged_updates(updates):
            delta = update.delta
            if update.choice not in self._begun:
                sent.append(self._opening(update.choice, usage))
            if delta.token_ids:
                sent.append(envelope.around(self._new_text(update.choice, delta)))
            if delta.finish_reason is not None:
                sent.append(envelope.around(self._ending(update.choice, delta)))
        return b"".join(sent)

    def final_events(self, answer: Answer) -> bytes:
        """See ``Writer``."""
        return frame(encode(self._chunk(usage_of(answer)))) if self._context.sends_usage else b""

    def _opening(self, choice: int, usage: Usage | None | UnsetType) -> bytes:
        """The event with the role, and with ``echo`` the message that is continued."""
        first = not self._begun
        self._begun.add(choice)
        says = ChatDelta(role=self._context.role, content=self._echo())
        prompt_token_ids = self._prompt_token_ids() if first else UNSET
        envelope = Envelope(self._chunk(usage, prompt_token_ids=prompt_token_ids))
        return envelope.around(ChatChunkChoice(index=choice, delta=says))

    def _new_text(self, choice: int, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _ending(self, choice: int, delta: Delta) -> ChatChunkChoice:
        # without a token, the text (held back by the detokenizer) has not been sent yet
        left = ChatDelta() if delta.token_ids or not delta.text else ChatDelta(content=delta.text)
        return ChatChunkChoice(
            index=choice,
            delta=left,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _chunk(
        self,
        usage: Usage | None | UnsetType,
        *,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._context.created,
            model=self._context.model,
            choices=[],
            system_fingerprint=self._context.fingerprint,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _choice(self, update: ChoiceUpdate) -> ChatChoice:
        delta = update.delta
        assert delta.finish_reason is not None, "the answer has ended"
        return ChatChoice(
            index=update.choice,
            message=ChatMessage(role=self._context.role, content=self._echo() + delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        top = self._request.top_logprobs or 0
        return chat_logprobs(self._context, delta.token_ids, delta.logprobs, top)

    def _echo(self) -> str:
        """The last message, if ``echo`` is set and the message is the beginning of the answer."""
        last = self._request.messages[-1]
        if not self._request.echo or last.get("role") != self._context.role:
            return ""
        content = last.get("content")
        if isinstance(content, list):  # text parts; other parts were refused
            return "\n".join(part["text"] for part in content)
        return content or ""

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._prompt.token_ids) if self._request.return_token_ids else UNSET

    def _running_usage(self, answer: Answer) -> Usage | None | UnsetType:
        if not self._context.sends_usage:
            return UNSET
        return usage_of(answer) if self._request.sends_continuous_usage else None
