"""How ``/v1/chat/completions`` is written, whole and as events.

Owns: ``ChatWriter``.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxinfer.engine.outputs import Delta, PositionLogprobs
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.sse import frame
from jaxinfer.server.openai.answer import Answer, Gain
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
from jaxinfer.server.openai.writer import Envelope, Reply, chat_logprobs, merged, usage_of


class ChatWriter:
    """See ``Writer``. A choice's events: its role, what it says, and its end by itself."""

    def __init__(
        self, reply: Reply, request: ChatCompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        self._reply = reply
        self._request = request
        self._prompt = prompts[0]
        self._id = f"chatcmpl-{reply.request_id}"
        self._begun: set[int] = set()
        self._envelope = Envelope(self._chunk(None if reply.sends_usage else UNSET))

    def whole(self, gains: Sequence[Gain], answer: Answer) -> ChatCompletion:
        """See ``Writer``."""
        choices = [self._choice(gain) for gain in merged(gains)]
        scored = self._request.prompt_logprobs is not None
        positions: list[PositionLogprobs | None] = [None]
        positions += [one for gain in gains for one in gain.delta.prompt_logprobs]
        return ChatCompletion(
            id=self._id,
            created=self._reply.created,
            model=self._reply.model,
            choices=sorted(choices, key=lambda choice: choice.index),
            system_fingerprint=self._reply.fingerprint,
            usage=usage_of(answer),
            prompt_logprobs=positions if scored else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    def frames(self, gains: Sequence[Gain], answer: Answer) -> bytes:
        """See ``Writer``."""
        usage = self._running_usage(answer)
        envelope = Envelope(self._chunk(usage)) if isinstance(usage, Usage) else self._envelope
        events: list[bytes] = []
        for gain in merged(gains):
            delta = gain.delta
            if gain.choice not in self._begun:
                events.append(self._opening(gain.choice, usage))
            if delta.token_ids:
                events.append(envelope.around(self._gained(gain.choice, delta)))
            if delta.finish_reason is not None:
                events.append(envelope.around(self._ending(gain.choice, delta)))
        return b"".join(events)

    def last_frames(self, answer: Answer) -> bytes:
        """See ``Writer``."""
        return frame(encode(self._chunk(usage_of(answer)))) if self._reply.sends_usage else b""

    def _opening(self, choice: int, usage: Usage | None | UnsetType) -> bytes:
        """The role, and with ``echo`` the message that is continued."""
        first = not self._begun
        self._begun.add(choice)
        says = ChatDelta(role=self._reply.role, content=self._echo())
        prompt_token_ids = self._prompt_token_ids() if first else UNSET
        envelope = Envelope(self._chunk(usage, prompt_token_ids=prompt_token_ids))
        return envelope.around(ChatChunkChoice(index=choice, delta=says))

    def _gained(self, choice: int, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice,
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _ending(self, choice: int, delta: Delta) -> ChatChunkChoice:
        # without a token its text (held back by the detokenizer) has not been sent
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
            created=self._reply.created,
            model=self._reply.model,
            choices=[],
            system_fingerprint=self._reply.fingerprint,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _choice(self, gain: Gain) -> ChatChoice:
        delta = gain.delta
        assert delta.finish_reason is not None, "the answer has ended"
        return ChatChoice(
            index=gain.choice,
            message=ChatMessage(role=self._reply.role, content=self._echo() + delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=list(delta.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        top = self._request.top_logprobs or 0
        return chat_logprobs(self._reply, delta.token_ids, delta.logprobs, top)

    def _echo(self) -> str:
        """The last message, if ``echo`` asks for it and it is the answer's own beginning."""
        last = self._request.messages[-1]
        if not self._request.echo or last.get("role") != self._reply.role:
            return ""
        content = last.get("content")
        if isinstance(content, list):  # text parts; anything else was refused
            return "\n".join(part["text"] for part in content)
        return content or ""

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._prompt.token_ids) if self._request.return_token_ids else UNSET

    def _running_usage(self, answer: Answer) -> Usage | None | UnsetType:
        if not self._reply.sends_usage:
            return UNSET
        return usage_of(answer) if self._request.sends_continuous_usage else None
