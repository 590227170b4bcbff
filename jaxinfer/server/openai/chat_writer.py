"""The writer of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.answer import Answer, ChoiceUpdate
from jaxinfer.server.api.choice_parts import ChoicePart, ChoiceParts, NumberedCall
from jaxinfer.server.openai.responses import (
    CalledCustom,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    CompletionTokensDetails,
    CustomCall,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from jaxinfer.server.openai.schema import ChatCompletionRequest
from jaxinfer.server.openai.writer import (
    EnvelopeWriter,
    ResponseContext,
    chat_logprobs,
    merged_updates,
    usage_of,
)
from jaxinfer.text.answers.call_parts import CallArguments
from jaxinfer.text.answers.parser import Content, Reasoning, joined_parts

_FINISH: Mapping[FinishReason, ChatFinishReason] = MappingProxyType(
    {reason: ChatFinishReason(reason.value) for reason in FinishReason}
)


class ChatWriter(EnvelopeWriter[ChatCompletionRequest]):
    """A choice has an event for its role, events for its parts, and a last event."""

    _id_prefix = "chatcmpl"
    _chunk_type = ChatChunk

    def __init__(
        self, context: ResponseContext, request: ChatCompletionRequest, prompts: Sequence[Prompt]
    ) -> None:
        super().__init__(context, request, prompts)
        self._choices: dict[int, _ChoiceReader] = {}
        reading = context.reading
        self._counts_thoughts = reading is not None and reading.format.has_reasoning

    def full_response(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> ChatCompletion:
        return ChatCompletion(
            **self._head,
            choices=[
                self._choice(update, parts)
                for update, parts in sorted(self._read(updates), key=lambda one: one[0].choice)
            ],
            usage=self._usage(answer),
            prompt_logprobs=self._prompt_logprobs_of(updates),
            prompt_token_ids=self._listed(self._prompts[0].token_ids),
        )

    def events(self, updates: Sequence[ChoiceUpdate], answer: Answer) -> bytes:
        read = self._read(updates)
        usage = self._running_usage(answer)
        envelope = self._envelope_with(usage)
        sent: list[bytes] = []
        for update, parts in read:
            delta = update.delta
            if update.choice not in self._begun:
                sent.append(self._opening(update.choice, usage))
            sent += map(envelope.around, self._new_parts(update.choice, delta, parts))
            if delta.finish_reason is not None:
                sent.append(envelope.around(self._ending(update.choice, delta)))
        return b"".join(sent)

    def _usage(self, answer: Answer) -> Usage:
        usage = usage_of(answer)
        if not self._counts_thoughts:
            return usage
        count = sum(reader.num_thought_tokens for reader in self._choices.values())
        details = CompletionTokensDetails(reasoning_tokens=count)
        return replace(usage, completion_tokens_details=details)

    def _read(self, updates: Sequence[ChoiceUpdate]) -> list[tuple[ChoiceUpdate, list[ChoicePart]]]:
        """One update for each choice, and the parts that its text adds."""
        merged, found = merged_updates(updates), dict[int, list[ChoicePart]]()
        for update in updates if self._counts_thoughts else merged:
            parts = self._reader(update.choice).read(update.delta)
            found.setdefault(update.choice, []).extend(parts)
        return [(update, joined_parts(found[update.choice])) for update in merged]

    def _reader(self, choice: int) -> _ChoiceReader:
        if choice not in self._choices:
            self._choices[choice] = _ChoiceReader(self._context, choice, self._request)
        return self._choices[choice]

    def _opening(self, choice: int, usage: Usage | None | UnsetType) -> bytes:
        """The event with the role, and with ``echo`` the message that is continued."""
        token_ids = UNSET if self._begun else self._listed(self._prompts[0].token_ids)
        self._begun.add(choice)
        says = ChatDelta(role=self._context.role, content=self._echo())
        envelope = self._envelope_with(usage, prompt_token_ids=token_ids)
        return envelope.around(ChatChunkChoice(index=choice, delta=says))

    def _new_parts(
        self, choice: int, delta: Delta, read: Sequence[ChoicePart]
    ) -> list[ChatChunkChoice]:
        """The events of new text: one for each part; the first has the data of the tokens."""
        parts = self._reader(choice).deltas(read)
        shows_tokens = bool(delta.token_ids) and (
            self._request.logprobs
            or self._request.return_token_ids
            or self._request.sends_continuous_usage
        )
        if not parts and shows_tokens:
            parts = [ChatDelta()]
        return [
            ChatChunkChoice(
                index=choice,
                delta=part,
                logprobs=None if number else self._logprobs(delta),
                token_ids=UNSET if number else self._listed(delta.token_ids),
            )
            for number, part in enumerate(parts)
        ]

    def _ending(self, choice: int, delta: Delta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice,
            delta=ChatDelta(),
            finish_reason=self._reader(choice).finish_reason(delta),
            stop_reason=delta.stop_reason,
        )

    def _choice(self, update: ChoiceUpdate, parts: Sequence[ChoicePart]) -> ChatChoice:
        delta, reader = update.delta, self._reader(update.choice)
        assert delta.finish_reason is not None, "the answer has ended"
        return ChatChoice(
            index=update.choice,
            message=reader.message(delta, parts, self._echo()),
            logprobs=self._logprobs(delta),
            finish_reason=reader.finish_reason(delta),
            stop_reason=delta.stop_reason,
            token_ids=self._listed(delta.token_ids),
            taps=self._taps(delta),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        top = self._request.top_logprobs or 0
        return chat_logprobs(self._context, delta.token_ids, delta.logprobs, top)

    def _echo(self) -> str:
        return self._request.echoed(self._context.role)


class _ChoiceReader:
    """Reads the text of one choice as parts of OpenAI's message."""

    def __init__(
        self, context: ResponseContext, choice: int, request: ChatCompletionRequest
    ) -> None:
        self._parts = ChoiceParts(context.reading, context.request_id, choice)
        self._role = context.role
        self._shows_reasoning = request.include_reasoning
        self._is_named = request.chosen_tools.is_named
        self._call: NumberedCall | None = None  # the last one

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of thoughts and their marks so far."""
        return self._parts.num_thought_tokens

    def message(self, delta: Delta, parts: Sequence[ChoicePart], before: str) -> ChatMessage:
        """The whole message; ``before`` is the text that it continues. Its content is null where
        the model wrote something, perhaps a call without its name, but no text for the user.
        """
        content = before + "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning)) or UNSET
        calls = _whole_calls(parts)
        return ChatMessage(
            role=self._role,
            content=None if delta.text and not content else content,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        )

    def deltas(self, parts: Sequence[ChoicePart]) -> list[ChatDelta]:
        """The new parts of the message."""
        found: list[ChatDelta] = []
        for part in parts:
            if isinstance(part, Content):
                found.append(ChatDelta(content=part.text))
            elif isinstance(part, Reasoning):
                found.append(ChatDelta(reasoning=part.text, reasoning_content=part.text))
            elif isinstance(part, NumberedCall):
                self._call = part
                called = _called(part, "", name=part.name)
                kind = "custom" if part.is_custom else "function"
                call = ToolCallDelta(index=part.number, id=part.id, type=kind, **called)
                found.append(ChatDelta(tool_calls=[call]))
            elif isinstance(part, CallArguments):
                assert self._call is not None, "a call has begun"
                call = ToolCallDelta(index=self._call.number, **_called(self._call, part.text))
                found.append(ChatDelta(tool_calls=[call]))
        return found

    def finish_reason(self, delta: Delta) -> ChatFinishReason:
        """OpenAI's reason: an answer with calls waits for their results, but the call of a function
        that the request names is the answer.
        """
        assert delta.finish_reason is not None
        if self._parts.ends_with_calls(delta) and not self._is_named:
            return ChatFinishReason.TOOL_CALLS
        return _FINISH[delta.finish_reason]

    def read(self, delta: Delta) -> list[ChoicePart]:
        """The new parts that the request shows."""
        parts = self._parts.read(delta)
        if self._shows_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]


def _whole_calls(parts: Sequence[ChoicePart]) -> list[ToolCall | CustomCall]:
    """The calls that the parts add up to; one that is cut off has the arguments so far."""
    begun: list[tuple[NumberedCall, list[str]]] = []
    for part in parts:
        if isinstance(part, NumberedCall):
            begun.append((part, []))
        elif isinstance(part, CallArguments):
            begun[-1][1].append(part.text)
    return [
        (CustomCall if call.is_custom else ToolCall)(
            id=call.id, **_called(call, "".join(arguments), name=call.name)
        )
        for call, arguments in begun
    ]


def _called(call: NumberedCall, text: str, **named: str) -> dict[str, Any]:
    """The field of a call with its arguments, or with the text of a custom tool."""
    if call.is_custom:
        return {"custom": CalledCustom(input=text, **named)}
    return {"function": CalledFunction(arguments=text, **named)}
