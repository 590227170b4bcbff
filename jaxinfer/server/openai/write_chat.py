"""Writes the response of ``/v1/chat/completions``, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxinfer.engine.outputs import Delta
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
)
from jaxinfer.server.openai.schema import ChatCompletionRequest
from jaxinfer.server.openai.writer import (
    EnvelopeWriter,
    chat_logprobs,
    in_order,
    merged_updates,
    usage_of,
)
from jaxinfer.text.messages import join_parts


class ChatWriter(EnvelopeWriter[ChatCompletionRequest]):
    """A choice has an event for its role, events for its text, and a last event."""

    _id_prefix = "chatcmpl"
    _chunk_type = ChatChunk

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> ChatCompletion:
        return ChatCompletion(
            **self._head,
            choices=[self._choice(update) for update in in_order(updates)],
            usage=usage_of(answer),
            prompt_logprobs=self._prompt_logprobs_of(updates),
            prompt_token_ids=self._listed(self._prompts[0].token_ids),
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        usage = self._running_usage(answer)
        envelope = self._envelope_with(usage)
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

    def _opening(self, choice: int, usage: Usage | None | UnsetType) -> bytes:
        """The event with the role, and with ``echo`` the message that is continued."""
        token_ids = UNSET if self._begun else self._listed(self._prompts[0].token_ids)
        self._begun.add(choice)
        says = ChatDelta(role=self._context.role, content=self._echo())
        envelope = self._envelope_with(usage, prompt_token_ids=token_ids)
        return envelope.around(ChatChunkChoice(index=choice, delta=says))

    def _new_text(self, choice: int, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            token_ids=self._listed(delta.token_ids),
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

    def _choice(self, update: ChoiceUpdate) -> ChatChoice:
        delta = update.delta
        assert delta.finish_reason is not None, "the answer has ended"
        return ChatChoice(
            index=update.choice,
            message=ChatMessage(role=self._context.role, content=self._echo() + delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=self._listed(delta.token_ids),
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
        # text parts; other parts were refused
        return join_parts(content) if isinstance(content, list) else content or ""
