"""Tools, calls and their results as the text of messages, for chat templates that write none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.messages import Message, arguments_object, content_text
from jaxinfer.text.template_probes import Renders

# without this a small model calls the tool again
_AFTER_RESULTS = "\n\nAnswer the user's question with the results, or call another tool."
_NAME, _INDEX, _STRING = "{name}", "{index}", "{string}"


def with_texts(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    calls: CallText,
    renders: Renders,
) -> list[Message]:
    """The result of ``check_messages`` with the parts that the template does not render as text:
    ``tools`` in a system message, calls as ``calls`` has them, results in messages of the user.
    Raises ``RequestError`` naming a call whose arguments are not a JSON object.
    """
    shows_tools = bool(tools) and not renders.tools
    found: list[Message] = []
    names: dict[str, str] = {}  # of the called functions, by the ids of the calls
    num_calls = 0
    for number, given in enumerate(messages):
        message, listed = dict(given), given.get("tool_calls") or ()
        for call in listed:
            names[str(call.get("id"))] = str(call.get("function", call).get("name"))
        if listed and not renders.calls:
            where = f"messages[{number}].tool_calls"
            made = [_named(f"{where}[{index}]", call) for index, call in enumerate(listed)]
            del message["tool_calls"]
            written = written_calls(calls, made, num_calls)
            message["content"] = _joined(content_text(message), written, "\n")
        elif message["role"] == "assistant" and shows_tools and calls.is_generic:
            message["content"] = _answer(calls, content_text(message))
        elif message["role"] == "tool" and not renders.results:
            name = message.get("name") or names.get(str(message.get("tool_call_id"))) or "tool"
            message = {"role": "user", "content": _result(name, content_text(message))}
        num_calls += len(listed)
        is_after = bool(found) and _is_text_result(messages[number - 1], found[-1])
        if is_after and message["role"] == "user":
            found[-1]["content"] = _joined(found[-1]["content"], content_text(message), "\n\n")
        else:
            found.append(message)
        following = messages[number + 1]["role"] if number + 1 < len(messages) else ""
        is_made = given["role"] == "tool" and not renders.results
        if shows_tools and is_made and following not in ("tool", "user"):
            found[-1]["content"] += _AFTER_RESULTS
    return _with_system(found, tools_text(tools, calls)) if shows_tools else found


def tools_text(tools: Sequence[Mapping[str, Any]], calls: CallText) -> str:
    """The tools, and how the model calls them."""
    functions = [cast("Mapping[str, Any]", tool.get("function", tool)) for tool in tools]
    listed = "\n".join(json.dumps(_shown(one), ensure_ascii=False) for one in functions)
    first = functions[0].get("name", "")
    if calls.is_generic:
        example = f"{calls.begin.replace(_NAME, first)}{{...}}{calls.end}"
        answer = f'{calls.answer_begin}"..."{calls.answer_end}'
        how = (
            f"Answer with one JSON object: {example} to call a tool, "
            f"or {answer} to answer the user."
        )
    else:
        parameters = functions[0].get("parameters") or {}
        values = dict.fromkeys(parameters.get("properties") or {}, "...")
        example = written_calls(calls, [(first, values)], 0)
        how = f"To call a tool, write its name and its arguments in this form:\n{example}"
    return f"You can call these tools:\n{listed}\n\n{how}"


def _shown(schema: Any) -> Any:
    """A function without what libraries add for machines: titles, and that no more is allowed."""
    if isinstance(schema, list):
        return [_shown(one) for one in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: one if key in ("enum", "const", "default") else _shown(one)
        for key, one in cast("Mapping[str, Any]", schema).items()
        if not (key == "title" and isinstance(one, str))
        and not (key == "additionalProperties" and one is False)
    }


def written_calls(
    calls: CallText, named: Sequence[tuple[str, Mapping[str, Any]]], first: int
) -> str:
    """Calls, each a name and arguments, as a model writes them; ``first`` is the number of the
    first one in its chat.
    """
    texts = [
        f"{calls.begin.replace(_NAME, name).replace(_INDEX, str(first + number))}"
        f"{_arguments(calls, arguments)}{calls.end}"
        for number, (name, arguments) in enumerate(named)
    ]
    return f"{calls.before}{calls.separator.join(texts)}{calls.after}"


def _arguments(calls: CallText, arguments: Mapping[str, Any]) -> str:
    match calls.style:
        case "tags":
            return "".join(_tag(calls, *item) for item in arguments.items())
        case "pairs":
            pairs = [f"{k}{calls.key_end}{_pair_value(calls, v)}" for k, v in arguments.items()]
            return calls.argument_separator.join(pairs)
        case _:
            return json.dumps(arguments, ensure_ascii=False)


def _tag(calls: CallText, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    begin = calls.argument_begin.replace(_NAME, key).replace(_STRING, str(is_text).lower())
    end = calls.argument_end.replace(_NAME, key)
    return f"{begin}{value if is_text else json.dumps(value, ensure_ascii=False)}{end}"


def _pair_value(calls: CallText, value: Any) -> str:
    """A value of a pair: JSON, or the dialect with its own quotes."""
    if calls.quotes and isinstance(value, str):
        return value.join(calls.quotes)
    if calls.quotes and isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value).items()
        return f"{{{','.join(f'{k}{calls.key_end}{_pair_value(calls, v)}' for k, v in inner)}}}"
    if calls.quotes and isinstance(value, list):
        return f"[{','.join(_pair_value(calls, one) for one in cast('list[Any]', value))}]"
    return json.dumps(value, ensure_ascii=False)


def _named(where: str, call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    return str(function.get("name")), arguments_object(f"{where}.function.arguments", arguments)


def _answer(calls: CallText, text: str) -> str:
    return f"{calls.answer_begin}{json.dumps(text, ensure_ascii=False)}{calls.answer_end}"


def _result(name: str, text: str) -> str:
    return f"The tool {name} returned:\n{text}"


def _is_text_result(given: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    """True if a message with a result became one of the user."""
    return given["role"] == "tool" and made["role"] == "user"


def _joined(first: str, second: str, between: str) -> str:
    return between.join(filter(None, (first, second)))


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text at the end of the first system message, which may be new."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": _joined(content_text(messages[0]), text, "\n\n")}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
