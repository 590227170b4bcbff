"""A chat's messages and tools in the form that a template accepts; see ``TemplateProbes``."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jaxinfer.core.errors import RequestError
from jaxinfer.text.messages import (
    Message,
    arguments_object,
    arguments_text,
    content_text,
    join_parts,
)
from jaxinfer.text.template_probes import PROBE_FUNCTION, PROBE_KEY, TemplateProbes

GUIDANCE = ("system", "developer")
ROLES = (*GUIDANCE, "user", "assistant", "tool")  # of OpenAI's chats
MAX_ROLE_CHARACTERS = 64  # that an error repeats
_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")


def adapted_messages(probes: TemplateProbes, messages: Sequence[Message]) -> list[Message]:
    """The result of ``check_messages`` in the form that the template accepts.

    Raises ``RequestError`` naming the message whose role or arguments it cannot render.
    """
    for index, message in enumerate(messages):
        _check_role(probes, f"messages[{index}]", message["role"])
    named = list(_with_names(probes, messages))
    if any(one.get("tool_calls") for one in named) and probes.limits_ids:
        named = [_with_short_ids(one) for one in named]
    contents = [_adapted(probes, f"messages[{n}]", one) for n, one in enumerate(named)]
    return _joined(probes, _calls_and_results(probes, _guidance(probes, contents)))


# roles


def _check_role(probes: TemplateProbes, where: str, role: str) -> None:
    """Refuse a role that the template does not name. One that names none takes any, as those of
    scores may.
    """
    takes_any = role and not any(map(probes.names, ROLES))
    if role not in ROLES and not takes_any and not (role and probes.names(role)):
        raise RequestError(
            f"{where}.role {role[:MAX_ROLE_CHARACTERS]!r} is not known to the chat template; use "
            f"one of {', '.join(ROLES)}."
        )


def _guidance(probes: TemplateProbes, messages: Sequence[Message]) -> list[Message]:
    """The chat with messages of the system and the developer as the template renders them.

    Those at the beginning are one message where it drops or refuses the second one, and those of a
    developer are the system's where it has no such role. Later ones are the user's where it drops
    or refuses them.
    """
    roles = [one["role"] for one in messages]
    number = next((n for n, role in enumerate(roles) if role not in GUIDANCE), len(roles))
    first = _first_guidance(probes, messages[:number])
    begins = tuple(one["role"] for one in first[:1])
    later = [
        {**one, "role": _later_role(probes, begins, f"messages[{n}]", one["role"])}
        if one["role"] in GUIDANCE
        else one
        for n, one in enumerate(messages[number:], number)
    ]
    return [*first, *later]


def _first_guidance(probes: TemplateProbes, messages: Sequence[Message]) -> list[Message]:
    if not messages:
        return []
    given = [one["role"] for one in messages]
    roles = [probes.guidance_role(role) for role in given]
    told = [{**one, "role": role} for one, role in zip(messages, roles, strict=True)]
    if len(told) > 1 and (roles != given or not probes.takes_guidance(*roles[:2])):
        told = [{**told[0], "content": "\n\n".join(map(content_text, told))}]
    if not probes.takes_guidance(roles[0]):
        raise RequestError(
            f"messages[0].role is {given[0]}, and the chat template renders no such messages; put "
            "the text into the first message of the user."
        )
    return told


def _later_role(probes: TemplateProbes, begins: Sequence[str], where: str, role: str) -> str:
    for one in (probes.guidance_role(role), "user"):
        if probes.takes_guidance(*begins, one, later=True):
            return one
    if probes.joins("user", "user"):
        return "user"
    raise RequestError(
        f"{where}.role is {role}, and the chat template renders such messages only at the "
        "beginning; put the text there, or into a message of the user."
    )


def with_system(
    probes: TemplateProbes, messages: list[Message], given: Sequence[Message]
) -> list[Message]:
    """The messages, whose first one may be a system message that the ``given`` ones have not: a
    template without one gets its text in the user's first message.
    """
    is_new = messages[0]["role"] == "system" != given[0]["role"]
    if not is_new or messages[1:2] == [] or probes.takes_guidance("system"):
        return messages
    system, first, *others = messages
    if first["role"] != "user":
        return [{**system, "role": "user"}, first, *others]
    return [{**first, "content": f"{system['content']}\n\n{content_text(first)}"}, *others]


# neighbours

_NEIGHBOURS = (("user", "user"), ("assistant", "assistant"), ("tool", "user"))


def _joined(probes: TemplateProbes, messages: Iterable[Message]) -> list[Message]:
    """The chat, in which a message is part of the one before it where the template refuses the two:
    agents send texts next to the results of tools, and several messages of one role.
    """
    found: list[Message] = []
    for message in messages:
        roles = (found[-1]["role"], message["role"]) if found else ("", "")
        calls = any(one.get("tool_calls") for one in (*found[-1:], message))
        if roles in _NEIGHBOURS and not calls and probes.joins(*roles):
            texts = filter(None, map(content_text, (found[-1], message)))
            found[-1] = {**found[-1], "content": "\n\n".join(texts)}
        else:
            found.append(message)
    return found


# calls


def _calls_and_results(probes: TemplateProbes, messages: Sequence[Message]) -> Iterator[Message]:
    """The chat with calls and their results in the messages that the template renders."""
    index = 0
    while index < len(messages):
        message, index = messages[index], index + 1
        if not message.get("tool_calls"):
            yield message
            continue
        end = index
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        *text, calling = _beside_calls(probes, message)
        yield from text
        yield from _with_results(probes, calling, messages[index:end])
        index = end


def _beside_calls(probes: TemplateProbes, message: Message) -> list[Message]:
    """A message with calls, and before it one with its text, if the template needs two."""
    text = content_text(message)
    if text and probes.splits_text:
        without_calls = {name: one for name, one in message.items() if name != "tool_calls"}
        return [without_calls, _without_text(probes, message)]
    if text and "thinking" in message and probes.joins_thoughts:
        joined = f"{message['thinking']}\n\n{text}"
        return [{**_without_text(probes, message), "content": joined}]
    return [message]


def _without_text(probes: TemplateProbes, message: Message) -> Message:
    names = ("content", *_THOUGHTS)
    kept = {name: value for name, value in message.items() if name not in names}
    return {**kept, **probes.call_form.absent}


def _with_results(
    probes: TemplateProbes, message: Message, results: Sequence[Message]
) -> Iterator[Message]:
    """A message with calls, and the results in the order of the calls: many templates write no
    ids. Each call has its own message if the template writes only one of them.
    """
    calls = message["tool_calls"]
    if len(calls) == 1 or len(results) < 2 and not probes.splits_calls:
        yield message
        yield from results
        return
    ids, left = [call.get("id") for call in calls], list(results)
    by_call: list[list[Message]] = []
    for call_id in ids:
        found = [one for one in left if one.get("tool_call_id") == call_id]
        by_call.append(found if ids.count(call_id) == 1 else found[:1])
        left = [one for one in left if not any(one is other for other in by_call[-1])]
    by_call[-1] += left
    if not probes.splits_calls:
        yield message
        for found in by_call:
            yield from found
        return
    for call, found in zip(calls, by_call, strict=True):
        yield {**message, "tool_calls": [call]}
        yield from found
        message = _without_text(probes, message)


def _with_short_ids(message: Message) -> Message:
    """A message whose ids of calls are nine letters and digits: those of other servers by their
    digests.
    """
    message = dict(message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    return message


def _short_id(call_id: Any) -> str:
    text = str(call_id or "")
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _with_names(probes: TemplateProbes, messages: Sequence[Message]) -> Iterator[Message]:
    """The chat, in which results have the names of their functions if the template needs them."""
    names: dict[Any, Any] = {}  # by the ids of the calls
    for message in messages:
        calls = message.get("tool_calls") or ()
        names |= {call.get("id"): call.get("function", call).get("name") for call in calls}
        is_result = message["role"] == "tool" and not message.get("name")
        name = names.get(message.get("tool_call_id")) if is_result else None
        yield {**message, "name": name} if name and probes.needs_names else message


# contents


def _adapted(probes: TemplateProbes, where: str, message: Message) -> Message:
    message = dict(message)
    calls = message.get("tool_calls")
    if "content" not in message:
        message |= probes.call_form.absent if calls else probes.absent_content
    elif isinstance(message["content"], list) and message["role"] not in probes.roles_with_parts:
        message["content"] = join_parts(message["content"])
    if calls:
        message["tool_calls"] = [
            _adapted_call(probes, f"{where}.tool_calls[{index}]", call)
            for index, call in enumerate(calls)
        ]
    return message


def _adapted_call(probes: TemplateProbes, where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        function = _adapted_call(probes, f"{where}.function", call["function"])
        return {**call, "function": function}
    arguments = call.get("arguments")
    if arguments is None:
        return dict(call)
    if probes.call_form.as_text:
        return {**call, "arguments": arguments_text(arguments)}
    return {**call, "arguments": arguments_object(f"{where}.arguments", arguments)}


# tools

type Function = Mapping[str, Any]


def _described(function: Function) -> Function:
    return {"description": "", **function}


def _parametrised(function: Function) -> Function:
    return {"parameters": _object(), **function}


def _typed(function: Function) -> Function:
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return function
    return {**function, "parameters": {**_object(), **cast("Function", parameters)}}


def _with_described_properties(function: Function) -> Function:
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return function
    return {**function, "parameters": _described_properties(cast("Function", parameters))}


def _described_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object's schema whose properties have descriptions, empty ones if need be."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return schema
    described = {
        name: _described(_described_properties(cast("Function", one)))
        if isinstance(one, Mapping)
        else one
        for name, one in cast("Function", properties).items()
    }
    return {**schema, "properties": described}


def _object(properties: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The schema of an object."""
    return {"type": "object", "properties": dict(properties or {})}


def _lacking(**fields: Any) -> Function:
    return {"name": PROBE_FUNCTION, **fields}


def _key(**fields: str) -> dict[str, Any]:
    return {PROBE_KEY: {"type": "string", **fields}}


# functions that lack one optional field, and what fills it in
_FILLS: Sequence[tuple[Function, Callable[[Function], Function]]] = (
    (_lacking(parameters=_object(_key(description="d"))), _described),
    (_lacking(description="d"), _parametrised),
    (_lacking(description="d", parameters={}), _typed),
    (_lacking(description="d", parameters={"type": "object"}), _typed),
    (_lacking(description="d", parameters={"properties": _key(description="d")}), _typed),
    (_lacking(description="d", parameters=_object(_key())), _with_described_properties),
)


def adapted_tools(probes: TemplateProbes, tools: Sequence[Any]) -> list[Any]:
    """The tools with the optional fields, empty, without which the template fails."""
    return [
        _tool(probes, cast("Function", tool)) if isinstance(tool, Mapping) else tool
        for tool in tools
    ]


def _tool(probes: TemplateProbes, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    given = cast("Function", function).items()
    whole: Function = {name: value for name, value in given if value is not None}
    for lacking, fill in _FILLS:
        filled = fill(whole)
        if filled != whole and probes.needs(json.dumps(lacking), json.dumps(fill(lacking))):
            whole = filled
    return {"type": "function", **tool, "function": whole}
