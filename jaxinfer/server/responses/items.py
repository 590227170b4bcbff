"""The input items of the Responses API: their checks, and the chat messages that they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from jaxinfer.core.errors import RequestError
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.responses.tools import HOSTED_ITEMS, joined_name
from jaxinfer.text.answers.call_parts import complete_arguments
from jaxinfer.text.messages import arguments_object, custom_arguments

KINDS = (
    *("message", "function_call", "function_call_output", "custom_tool_call"),
    *("custom_tool_call_output", "reasoning"),
)
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
OTHER_PARTS = ("input_image", "input_file", "input_audio", "image_url", "computer_screenshot")
# the order in which a template writes the fields of an assistant's message
_FIELDS = ("reasoning_content", "content", "tool_calls")

type Item = Mapping[str, Any]
type Message = dict[str, Any]


def input_items(given: str | Sequence[Any]) -> tuple[Item, ...]:
    """The items of ``input``, checked; text is the message of a user. Raises ``ApiError`` (400)."""
    if isinstance(given, str):
        part = {"type": "input_text", "text": given}
        return ({"type": "message", "role": "user", "content": [part]},)
    for index, item in enumerate(given):
        _check(f"input[{index}]", item)
    return tuple(given)


def hosted_items(items: Iterable[Item]) -> list[tuple[str, str]]:
    """The path and kind of each item of a tool that this server does not run."""
    return [
        (f"input[{index}]", kind)
        for index, item in enumerate(items)
        if (kind := _kind(item)) in HOSTED_ITEMS
    ]


def check_outputs(earlier: Iterable[Item], items: Sequence[Item]) -> None:
    """Raise ``ApiError`` for an output whose call is in none of the items before it."""
    ids = {item.get("call_id") for item in earlier if str(_kind(item)).endswith("_call")}
    for index, item in enumerate(items):
        kind = str(_kind(item))
        if kind.endswith("_call"):
            ids.add(item.get("call_id"))
        elif kind in HOSTED_ITEMS:
            continue
        elif kind.endswith("_call_output") and item.get("call_id") not in ids:
            where = f"input[{index}].call_id"
            raise field_error(
                where,
                f"{where} {item.get('call_id')!r:.60} is not the id of an earlier call; send its "
                f"{kind.removesuffix('_output')} too",
            )


def messages_of(items: Iterable[Item], instructions: str | None = None) -> list[Message]:
    """The items as messages of a chat. The thoughts, text and calls of one answer become one
    message; instructions are the system's. ``text.chat_forms`` knows which roles templates have.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}  # of functions, by the id of their call
    for item in items:
        match _kind(item):
            case "reasoning":
                if text := _thoughts(item):
                    _answer_message(messages, "reasoning_content")["reasoning_content"] = text
            case "function_call" | "custom_tool_call":
                call = _call(item)
                names[item["call_id"]] = call["function"]["name"]
                message = _answer_message(messages, "tool_calls")
                message.setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                result = {"role": "tool", "tool_call_id": item["call_id"]}
                if name := names.get(item["call_id"]):
                    result["name"] = name
                messages.append({**result, "content": _text("", item["output"])})
            case kind if kind in HOSTED_ITEMS:
                pass
            case _:
                _add_message(messages, item)
    return messages


def _add_message(messages: list[Message], item: Item) -> None:
    role, text = item["role"], _text("", item["content"])
    if role == "assistant":
        _answer_message(messages, "content")["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _answer_message(messages: list[Message], field: str) -> Message:
    """The last message if it is an answer to which this field can be added, else a new one."""
    last = messages[-1] if messages else {}
    later = _FIELDS[_FIELDS.index(field) + (field == "tool_calls") :]
    if last.get("role") != "assistant" or any(name in last for name in later):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _call(item: Item) -> dict[str, Any]:
    """A call in the form of a chat, which knows functions only. Of arguments that the model has
    not ended those before the end are left.
    """
    if _kind(item) == "custom_tool_call":
        arguments = custom_arguments(item["input"])
    else:
        arguments = item.get("arguments") or "{}"
        if item.get("status") == "incomplete":
            arguments = complete_arguments(arguments)
    function = {"name": joined_name(item["name"], item.get("namespace")), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _thoughts(item: Item) -> str:
    """The text of a reasoning item; empty for one that another server has encrypted."""
    parts = item.get("content") or item.get("summary") or ()
    return "\n".join(part["text"] for part in parts)


def _kind(item: Item) -> Any:
    return item.get("type") or "message"


# checks


def _check(where: str, item: Item) -> None:
    """Raise ``ApiError`` unless this is an item of ``KINDS``."""
    match _kind(item):
        case "message":
            if item.get("role") not in ROLES:
                raise field_error(f"{where}.role", f"{where}.role must be one of {_list(ROLES)}")
            _text(f"{where}.content", item.get("content"))
        case "function_call":
            for name in ("call_id", "name"):
                _check_name(f"{where}.{name}", item.get(name))
            is_cut = item.get("status") == "incomplete"
            _check_arguments(f"{where}.arguments", item.get("arguments"), is_cut=is_cut)
        case "custom_tool_call":
            for name in ("call_id", "name"):
                _check_name(f"{where}.{name}", item.get(name))
            if not isinstance(item.get("input"), str):
                raise field_error(f"{where}.input", f"{where}.input must be a string")
        case "function_call_output" | "custom_tool_call_output":
            _check_name(f"{where}.call_id", item.get("call_id"))
            _text(f"{where}.output", item.get("output"))
        case "reasoning":
            for name in ("summary", "content"):
                _check_thoughts(f"{where}.{name}", item.get(name))
        case other if other not in HOSTED_ITEMS:
            raise field_error(
                f"{where}.type", f"{where}.type {other!r:.60} is not supported; use {_list(KINDS)}"
            )
        case _:  # of a hosted tool
            pass


def _text(where: str, content: Any) -> str:
    """The text of a content, whose parts are joined by newlines; raises ``ApiError``."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise field_error(where, f"{where} must be a string or a list of text parts")
    parts = cast("Sequence[Any]", content)
    return "\n".join(_part_text(f"{where}[{index}]", part) for index, part in enumerate(parts))


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise field_error(where, f"{where} must be an object with type and text")
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type")
    if kind in OTHER_PARTS:
        raise field_error(
            f"{where}.type",
            f"{where}.type {kind!r} is not supported: this server's models read text alone; "
            "leave the part out",
        )
    if kind not in TEXT_PARTS:
        raise field_error(
            f"{where}.type", f"{where}.type {kind!r:.60} is not supported; use {_list(TEXT_PARTS)}"
        )
    name = "refusal" if kind == "refusal" else "text"
    text = fields.get(name)
    if not isinstance(text, str):
        raise field_error(f"{where}.{name}", f"{where}.{name} must be a string")
    return text


def _check_name(where: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise field_error(where, f"{where} must be a string that is not empty")


def _check_arguments(where: str, arguments: Any, *, is_cut: bool) -> None:
    if not isinstance(arguments, str):
        raise field_error(where, f"{where} must be a JSON object as text")
    if is_cut:
        return
    try:
        arguments_object(where, arguments or "{}")
    except RequestError as error:
        raise field_error(where, str(error)) from None


def _check_thoughts(where: str, parts: Any) -> None:
    """Raise ``ApiError`` unless these are the parts of a reasoning item, or absent."""
    listed = cast("Sequence[Any]", parts or ())
    if not isinstance(listed, list | tuple):
        raise field_error(where, f"{where} must be a list of objects with text")
    for index, part in enumerate(listed):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise field_error(f"{where}[{index}]", f"{where}[{index}] must be an object with text")


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
