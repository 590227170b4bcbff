"""Custom tools, whose calls are free text, as functions with one text: models know no other calls.

A function that stands for a custom tool has the tool's own fields as ``custom`` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from jaxinfer.core.structured import MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES
from jaxinfer.server.openai.fields import field_error
from jaxinfer.server.openai.tools import ToolChoice
from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.grammar.lark_regex import NotRegular, lark_as_regex
from jaxinfer.text.messages import CUSTOM_INPUT

_SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
)
_MOST = MappingProxyType({"lark": MAX_GRAMMAR_BYTES, "regex": MAX_REGEX_BYTES})  # bytes


class _Grammar(NamedTuple):
    """The grammar of a custom tool's text."""

    syntax: str
    definition: str
    pattern: str | None  # the grammar as a regular expression
    reason: str = ""  # why there is none


def as_functions(tools: Sequence[Any]) -> tuple[Any, ...]:
    """The tools of a chat with functions for custom ones; raises ``ApiError`` naming the field."""
    return tuple(
        _as_function(f"tools[{number}].custom", tool)
        if isinstance(tool, Mapping) and tool.get("type") == "custom"
        else tool
        for number, tool in enumerate(tools)
    )


def as_function_choice(choice: Any) -> Any:
    """A ``tool_choice`` that names a custom tool as one that names its function."""
    match choice:
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name}}
        case _:
            return choice


def check_format(where: str, given: Any) -> None:
    """Raise ``ApiError`` unless this is a custom tool's format, or absent."""
    _grammar(where, given)


def enforceable(choice: ToolChoice, calls: CallText | None) -> tuple[ToolChoice, list[str]]:
    """The choice without formats that calls in this form may break, and for each of them the name
    of the tool and the reason.
    """
    tools: list[Mapping[str, Any]] = []
    broken: list[str] = []
    for tool in choice.tools:
        custom = tool.get("custom")
        grammar = None if custom is None else _grammar("", custom.get("format"))
        if custom is not None and grammar is not None:
            reason = grammar.reason
            if calls is None or (calls.style == "pairs" and calls.quotes):
                reason = "this model's form of calls takes no grammar"
                tool = without_format(tool)
            if reason:
                broken.append(f"{custom['name']!r:.60}: {reason}")
        tools.append(tool)
    return replace(choice, tools=tuple(tools)), broken


def without_format(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function for a custom tool whose text may have any form."""
    kept = ("name", "description")
    function = {key: value for key, value in tool["function"].items() if key in kept}
    return {**tool, "function": {**function, "parameters": dict(_SCHEMA)}}


def input_of(arguments: str) -> str:
    """The text of a custom tool's call, from the arguments of the function for it. Models whose
    calls are not enforced may name the text otherwise: then all arguments are the text.
    """
    found = json.loads(arguments).get(CUSTOM_INPUT)
    return found if isinstance(found, str) else arguments


def _as_function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    custom = tool.get("custom")
    if not isinstance(custom, Mapping):
        raise field_error(where, f"{where} must be an object")
    custom = cast("Mapping[str, Any]", custom)
    grammar = _grammar(f"{where}.format", custom.get("format"))
    texts = [custom.get("description"), _described(grammar)]
    function = {
        "name": custom.get("name"),
        "description": "\n\n".join(text for text in texts if isinstance(text, str)),
        "parameters": dict(_SCHEMA),
    }
    if grammar is not None and grammar.pattern is not None:
        text = {"type": "string", "pattern": f"^(?:{grammar.pattern})$"}
        function |= {
            "parameters": {**_SCHEMA, "properties": {CUSTOM_INPUT: text}},
            "text_pattern": grammar.pattern,
            "strict": True,
        }
    return {"type": "function", "function": function, "custom": custom}


def _described(grammar: _Grammar | None) -> str:
    """What the model is told of the text's form."""
    text = f"The argument {CUSTOM_INPUT} is the whole text of the call"
    if grammar is None:
        return f"{text}."
    syntax = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
    return f"{text}, which follows this {syntax}:\n{grammar.definition}"


def _grammar(where: str, given: Any) -> _Grammar | None:
    """The grammar of a format in either API's form, None for any text; raises ``ApiError``."""
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "grammar", "grammar": {"syntax": str(syntax), "definition": str(text)}}:
            where += ".grammar"
        case {"type": "grammar", "syntax": str(syntax), "definition": str(text)}:
            pass
        case _:
            raise field_error(
                where,
                f'{where} must be {{"type": "text"}} or a grammar with a syntax, lark or regex, '
                "and a definition",
            )
    if syntax not in _MOST:
        raise field_error(f"{where}.syntax", f"{where}.syntax must be lark or regex")
    where += ".definition"
    if not 0 < len(text.encode()) <= _MOST[syntax]:
        raise field_error(where, f"{where} must have 1 to {_MOST[syntax]} bytes as {syntax}")
    if syntax == "regex":
        return _Grammar(syntax, text, text)
    try:
        return _Grammar(syntax, text, lark_as_regex(text))
    except NotRegular as error:
        return _Grammar(syntax, text, None, str(error))
    except ValueError as error:
        raise field_error(where, f"{where} cannot be used: {error}; correct the grammar") from None
