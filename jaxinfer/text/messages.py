"""Chat messages in one form, for all optional fields that OpenAI's clients may send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from jaxinfer.core.errors import RequestError
from jaxinfer.text.answers.call_parts import complete_arguments

type Message = dict[str, Any]

CUSTOM_INPUT = "input"  # the argument of the function that stands for a custom tool
# Names under which clients send an answer's reasoning; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Fields that count as absent if they are empty. An empty content can be an answer.
_ABSENT_WHEN_EMPTY = frozenset(
    {
        *_REASONING,
        *("name", "tool_calls", "tool_call_id", "function_call"),
        *("refusal", "audio", "annotations"),
    }
)


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """Copy ``messages`` without absent fields.

    A message is a mapping (or an object of the openai client) with a string ``role`` and
    ``content``: a string, or a list of ``{"type": "text", "text": ...}``. An assistant's message
    and one with ``tool_calls`` may lack content; the copy then has no such key. A tool's missing
    content becomes "". A field that is null counts as absent, and so does an empty optional one.
    A tool's message names an earlier call by its id. Other keys are passed to the template. Raises
    ``RequestError`` naming the message.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message.")
    checked = [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    _check_results(checked)
    return checked


def _check_results(messages: Sequence[Message]) -> None:
    """Raise ``RequestError`` for a result whose call is not in the chat. Calls without an id have
    results without one, in their order.
    """
    ids = set[Any]()
    for index, message in enumerate(messages):
        ids |= {call.get("id") for call in message.get("tool_calls", ())}
        given, where = message.get("tool_call_id"), f"messages[{index}].tool_call_id"
        if message["role"] != "tool" or given in ids:
            continue
        if given is None:
            raise RequestError(
                f"{where} is required; it is the id of the call whose result the message is."
            )
        raise RequestError(
            f"{where} {given!r:.60} is not the id of an earlier call; send the assistant's message "
            "with the call too."
        )


def arguments_object(where: str, arguments: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call as an object. Of a text that a model has not written as JSON, those
    before the mistake: the client cannot change what was said, and sends it with each further turn.
    Raises ``RequestError`` for another JSON value than an object.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply; send flatter JSON.") from None
    except ValueError:
        return complete_arguments(arguments)
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise RequestError(f"{where} must be a JSON object as text, but is another JSON value.")
    return cast("dict[str, Any]", parsed)


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool, in a call with this text."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def arguments_text(arguments: str | Mapping[str, Any]) -> str:
    """The arguments of a call as JSON text; text stays as it is."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def join_parts(parts: Sequence[Mapping[str, str]]) -> str:
    """The text of a content in parts, joined by newlines as in vLLM."""
    return "\n".join(part["text"] for part in parts)


def content_text(message: Message) -> str:
    """The content of a message as text; "" if it has none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else join_parts(content)


def _message(where: str, given: Any) -> Message:
    message = {
        key: value
        for key, value in _object(where, given, "role and content").items()
        if key not in _ABSENT_WHEN_EMPTY or value or not isinstance(value, Sequence | Mapping)
    }
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string.")
    if not isinstance(message.get("tool_call_id"), str | None):
        raise RequestError(f"{where}.tool_call_id must be a string.")
    if "function_call" in message:
        raise RequestError(f"{where}.function_call is not supported; use tool_calls.")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    content = _content(f"{where}.content", message)
    if content is None:
        message.pop("content", None)
    else:
        message["content"] = content
    return message


def _as_mapping(value: Any) -> Any:
    """An object of the openai client as a dictionary."""
    dump = getattr(value, "model_dump", None)
    return dump() if callable(dump) else value


def _object(where: str, given: Any, content: str) -> dict[str, Any]:
    """An object, such as a mapping, without fields that are null."""
    given = _as_mapping(given)
    if not isinstance(given, Mapping):
        raise RequestError(f"{where} must be an object with {content}.")
    fields = cast("Mapping[str, Any]", given)
    return {key: value for key, value in fields.items() if value is not None}


def _content(where: str, message: Message) -> str | list[dict[str, str]] | None:
    """The content as text or text parts; None if it is missing and the message may lack it."""
    content = message.get("content")
    if "tool_calls" in message and content in ("", [], ()):
        return None
    if content is None and ("tool_calls" in message or message["role"] == "assistant"):
        return None
    if content is None and message["role"] == "tool":
        return ""  # a function that returns nothing
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where} must be a string or a list of text parts.")
    parts = cast("Sequence[Any]", content)
    return [_part(f"{where}[{index}]", part) for index, part in enumerate(parts)] or ""


def _part(where: str, part: Any) -> dict[str, Any]:
    part = _as_mapping(part)
    match part:
        case {"type": "text", "text": str()}:
            return dict(part)
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case _:
            raise RequestError(
                f'{where} must be {{"type": "text", "text": a string}}; '
                "other kinds of content are not supported."
            )


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} must be a list of tool calls.")
    return [
        _tool_call(f"{where}[{index}]", call)
        for index, call in enumerate(cast("Sequence[Any]", calls))
    ]


def _tool_call(where: str, given: Any) -> dict[str, Any]:
    call = _object(where, given, "id, type and function")
    if "custom" in call:
        custom = _object(f"{where}.custom", call.pop("custom"), "name and input")
        if not isinstance(text := custom.get("input"), str):
            raise RequestError(f"{where}.custom.input must be a string.")
        if not isinstance(custom.get("name"), str):
            raise RequestError(f"{where}.custom.name must be a string.")
        function = {"name": custom.get("name"), "arguments": custom_arguments(text)}
        call |= {"type": "function", "function": function}
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where}.id must be a string.")
    if not call.get("id"):
        call.pop("id", None)
    if "function" not in call and "name" not in call:
        raise RequestError(f"{where}.function is required: an object with name and arguments.")
    if "function" not in call:  # in the form before OpenAI's
        return _with_arguments(where, call)
    where += ".function"
    call["function"] = _with_arguments(
        where, _object(where, call["function"], "name and arguments")
    )
    return call if "type" in call else {**call, "type": "function"}


def _with_arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    """The function, with an empty object if the call has no arguments."""
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f"{where}.name must be the name of a function.")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {**function, "arguments": {}}
    if not isinstance(arguments, (str, Mapping)):
        raise RequestError(f"{where}.arguments must be a JSON object as text, or an object.")
    return function


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
