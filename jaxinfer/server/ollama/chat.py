"""A request of ollama's API as one of OpenAI's chats, or as a prompt, which the rest of the server
answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxinfer.server.api.fields import GenerationFields, RequestedTokens, field_error
from jaxinfer.server.api.tools import ID_CHARACTERS
from jaxinfer.server.ollama.inputs import CallInput, MessageInput
from jaxinfer.server.openai.schema import ChatCompletionRequest

JSON = "json"  # the format of any JSON object
FORMAT_FIELD = "format"


class OllamaChat(ChatCompletionRequest, frozen=True, kw_only=True, dict=True):
    """A chat with the differences of ollama's API."""

    form_of_answer: dict[str, Any] | None = None

    def chosen_form(self) -> tuple[str, Mapping[str, Any]] | None:
        return None if self.form_of_answer is None else (FORMAT_FIELD, self.form_of_answer)

    def requested_tokens(self) -> RequestedTokens | None:
        """None: ``num_predict`` may exceed the context, which then ends the answer."""
        return None

    def output_limit(self) -> int | None:
        return self.max_tokens


class OllamaText(GenerationFields, frozen=True, kw_only=True, dict=True):
    """A prompt that no template changes."""

    logprobs_field: ClassVar[str] = "top_logprobs"

    form_of_answer: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def chosen_form(self) -> tuple[str, Mapping[str, Any]] | None:
        return None if self.form_of_answer is None else (FORMAT_FIELD, self.form_of_answer)

    def requested_tokens(self) -> RequestedTokens | None:
        return None

    def output_limit(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def form_of(given: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The parameters of the form that the field ``format`` has."""
    if not given:
        return None
    return {"json_object": True} if given == JSON else {"json": given}


def thinking_fields(think: bool | str | None) -> dict[str, Any]:
    """The chat's fields that switch thoughts on or off."""
    if think is None:
        return {}
    if think is False:
        return {"reasoning_effort": "none"}
    effort = {"reasoning_effort": think} if isinstance(think, str) else {}
    return {**effort, "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}


def refuse_images(messages: Sequence[MessageInput]) -> None:
    """Raise ``ApiError`` if a message has images."""
    for number, message in enumerate(messages):
        if message.images:
            where = f"messages[{number}].images"
            raise field_error(
                where,
                f"{where} is not supported: the models here read text alone; leave it out",
            )


def chat_messages(messages: Sequence[MessageInput]) -> tuple[dict[str, Any], ...]:
    """The messages of the chat. Calls have ids, which many of ollama's clients leave out, and each
    result that of its call.
    """
    chat: list[dict[str, Any]] = []
    unanswered: list[dict[str, Any]] = []  # calls
    num_calls = 0
    for given in messages:
        message: dict[str, Any] = {"role": given.role, "content": given.content or ""}
        if given.thinking:
            message["reasoning_content"] = given.thinking
        if given.tool_calls:
            calls = [_call(one, num_calls + n) for n, one in enumerate(given.tool_calls)]
            num_calls, unanswered = num_calls + len(calls), calls.copy()
            message["tool_calls"] = calls
        if given.role == "tool":
            message |= _of_call(given, unanswered)
        chat.append(message)
    return tuple(chat)


def _call(given: CallInput, number: int) -> dict[str, Any]:
    function = {"name": given.function.name, "arguments": given.function.arguments or {}}
    made = f"call{number:0{ID_CHARACTERS - len('call')}}"
    return {"id": given.id or made, "type": "function", "function": function}


def _of_call(result: MessageInput, unanswered: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a result that name its call, which is taken out of ``unanswered``."""
    named = {"name": result.tool_name} if result.tool_name else {}
    if result.tool_call_id:
        unanswered[:] = [one for one in unanswered if one["id"] != result.tool_call_id]
        return {**named, "tool_call_id": result.tool_call_id}
    fitting = [one for one in unanswered if one["function"]["name"] == result.tool_name]
    if not (found := (fitting or unanswered)[:1]):
        return named  # a result without a call, which is refused where chats are
    unanswered.remove(found[0])
    return {**named, "tool_call_id": found[0]["id"]}
