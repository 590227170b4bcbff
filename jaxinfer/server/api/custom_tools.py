"""Custom tools, whose calls are free text, as functions with one text: models know no other calls.

A function that stands for a custom tool has the tool's own fields as ``custom`` beside it, and why
its format is not enforced as ``unenforced``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard, cast

from jaxinfer.core.structured import MAX_REGEX_BYTES
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.api.tools import ToolChoice
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
# the arguments of a call up to the end of its text, or of the text so far
_BEGUN = re.compile(
    rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"(?P<text>(?:[^"\\]|\\u[0-9a-fA-F]{{4}}|\\[^u])*+)'
)
SYNTAXES = ("lark", "regex")
MAX_TOTAL_BYTES = 4 * MAX_REGEX_BYTES  # of the grammars of a request: reading them takes 50 ms


class _Grammar(NamedTuple):
    """The grammar of a custom tool's text."""

    syntax: str
    definition: str
    pattern: str | None  # the grammar as a regular expression
    reason: str = ""  # why there is none


def as_functions(tools: Sequence[Any]) -> tuple[Any, ...]:
    """The tools of a chat with functions for custom ones; raises ``ApiError`` naming the field."""
    customs = [tool.get("custom") if _is_custom(tool) else None for tool in tools]
    check_formats((f"tools[{n}].custom", one) for n, one in enumerate(customs) if one is not None)
    return tuple(
        _as_function(f"tools[{number}].custom", tool) if _is_custom(tool) else tool
        for number, tool in enumerate(tools)
    )


def as_function_choice(choice: Any) -> Any:
    """A ``tool_choice`` that names custom tools as one that names their functions."""
    match choice:
        case {"type": "custom", "custom": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(tools), **others}}:
            allowed = {**others, "tools": [as_function_choice(one) for one in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice


def check_formats(tools: Iterable[tuple[str, Any]]) -> None:
    """Raise ``ApiError`` unless these custom tools, at these paths, have usable formats."""
    found = [(f"{where}.format", tool.get("format")) for where, tool in tools if _is_object(tool)]
    if sum(len(_definition(where, given)[1]) for where, given in found) > MAX_TOTAL_BYTES:
        raise field_error("tools", f"tools have grammars of more than {MAX_TOTAL_BYTES} bytes")
    for where, given in found:
        _grammar(where, given)


def enforceable(choice: ToolChoice, calls: CallText | None) -> tuple[ToolChoice, list[str]]:
    """The choice without formats that calls in this form may break, and for each of them the name
    of the tool and the reason.
    """
    takes_none = calls is None or (calls.style == "pairs" and bool(calls.quotes))
    tools: list[Mapping[str, Any]] = []
    broken: list[str] = []
    for tool in choice.tools:
        reason = tool.get("unenforced", "")
        if takes_none and "text_pattern" in tool["function"]:
            reason, tool = "this model's form of calls takes no grammar", without_format(tool)
        if reason:
            broken.append(f"{tool['function']['name']!r:.60}: {reason}")
        tools.append(tool)
    return replace(choice, tools=tuple(tools)), broken


def without_format(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function for a custom tool whose text may have any form."""
    kept = ("name", "description")
    function = {key: value for key, value in tool["function"].items() if key in kept}
    return {**tool, "function": {**function, "parameters": dict(_SCHEMA)}}


def input_of(arguments: str) -> str:
    """The text of a custom tool's call, from the arguments of the function for it, which may be cut
    off. Models whose calls are not enforced may name the text otherwise: then all arguments are the
    text.
    """
    begun = _BEGUN.match(arguments)
    if begun is None:
        return arguments
    try:
        text = json.loads(f'"{begun["text"]}"', strict=False)
    except ValueError:  # an escape that is none
        return arguments
    return text.encode(errors="replace").decode()  # half of a surrogate pair has no bytes


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
    reason = "" if grammar is None else grammar.reason
    return {"type": "function", "function": function, "custom": custom, "unenforced": reason}


def _described(grammar: _Grammar | None) -> str:
    """The words in which the model is told of the text's form."""
    text = f"The argument {CUSTOM_INPUT} is the whole text of the call"
    if grammar is None:
        return f"{text}."
    syntax = "Lark grammar" if grammar.syntax == "lark" else "regular expression"
    return f"{text}, which follows this {syntax}:\n{grammar.definition}"


def _grammar(where: str, given: Any) -> _Grammar | None:
    """The grammar of a format, None for any text; raises ``ApiError``."""
    syntax, text = _definition(where, given)
    if not syntax:
        return None
    if syntax == "regex":
        return _Grammar(syntax, text, text)
    try:
        return _Grammar(syntax, text, *_lark(text))
    except ValueError as error:
        where = _of_definition(where, given)
        raise field_error(where, f"{where} cannot be used: {error}; correct the grammar") from None


def _definition(where: str, given: Any) -> tuple[str, str]:
    """Syntax and text of the grammar in a format in either API's form, both empty for any text;
    raises ``ApiError``.
    """
    match given:
        case None | {"type": "text"}:
            return "", ""
        case {"type": "grammar", "grammar": {"syntax": str(syntax), "definition": str(text)}}:
            pass
        case {"type": "grammar", "syntax": str(syntax), "definition": str(text)}:
            pass
        case _:
            raise field_error(
                where,
                f'{where} must be {{"type": "text"}} or a grammar with a syntax, lark or regex, '
                "and a definition",
            )
    where = _of_definition(where, given)
    if syntax not in SYNTAXES:
        where = where.replace("definition", "syntax")
        raise field_error(where, f"{where} must be lark or regex")
    if not 0 < len(text.encode()) <= MAX_REGEX_BYTES:
        raise field_error(where, f"{where} must have 1 to {MAX_REGEX_BYTES} bytes")
    return syntax, text


def _of_definition(where: str, given: Mapping[str, Any]) -> str:
    """The path of the definition in the format at ``where``."""
    return f"{where}{'.grammar' if 'grammar' in given else ''}.definition"


@lru_cache(maxsize=64)  # agents send the same grammars with each request
def _lark(definition: str) -> tuple[str | None, str]:
    """The grammar as an expression, or None and the reason; raises ``ValueError``."""
    try:
        return lark_as_regex(definition), ""
    except NotRegular as error:
        return None, str(error)


def _is_custom(tool: Any) -> bool:
    return _is_object(tool) and tool.get("type") == "custom"


def _is_object(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
