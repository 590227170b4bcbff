"""Values in the parts of an answer: readers by name, transforms, and tool calls.

The names and arguments of the readers are those of transformers' ``response_template``. Here the
values of ``json`` are strict JSON apart from the dialect that the arguments name, since they become
the arguments of calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import regex

from jaxinfer.text.answers.argument_types import typed
from jaxinfer.text.answers.python_calls import read_python_calls, read_python_value
from jaxinfer.text.answers.strict_json import JsonStringReader, strict_json


class Call(NamedTuple):
    """A call of a tool; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


type Arguments = Mapping[str, Any]
type Reader = Callable[[str, Arguments], Any]

_JSON_STRING = r'(?P<json>"(?:\\.|[^"\\])*+")'
_PYTHON_STRING = r"(?P<python>'(?:\\.|[^'\\])*+')(?=\s*(?:[\[\]{},:]|\Z))"
_WORD = r'[^\s\[\]{},:"][^\[\]{},:"]*'
_PYTHON_WORDS: Mapping[str, str] = MappingProxyType(
    {"True": "true", "False": "false", "None": "null"}
)


def _read_text(text: str, args: Arguments) -> str:
    return text.strip() if args.get("strip", True) else text


def _read_json_string(text: str, args: Arguments) -> str:
    return JsonStringReader().feed(text)


def _read_bool(text: str, args: Arguments) -> bool:
    return text.strip().lower() in ("true", "1")


def _read_json(text: str, args: Arguments) -> Any:
    """JSON. ``string_delims``: pairs of further marks around strings, whose text is taken as it is;
    ``unquoted_keys``: keys without quotes; ``allow_non_json``: other text is a string.
    """
    try:
        return strict_json(_standard_json(text, args))
    except ValueError:
        if args.get("allow_non_json"):
            return _read_text(text, args)
        raise


def read_dialect(text: str, args: Arguments) -> Any:
    """The value of an argument in a dialect of JSON, in which models also write strings and words
    as in Python, and strings without marks; a word that is none of these is text.
    """
    try:
        return strict_json(_standard_json(text, args))
    except ValueError:
        pass
    try:
        return strict_json(_with_words(text, args))
    except ValueError:
        if regex.search(r'["\[\]{}]|^\s*$', text):
            raise
        return text.strip()


def _with_words(text: str, args: Arguments) -> str:
    """The text of a dialect in standard JSON, in which everything between marks, quotes and
    punctuation is a number, a word of JSON or Python, or a string.
    """
    marks = [
        f"{regex.escape(a)}(?P<marked>.*?){regex.escape(b)}"
        for a, b in args.get("string_delims", ())
    ]
    pattern = "|".join((*marks, _JSON_STRING, _PYTHON_STRING, _WORD))

    def standard(found: regex.Match[str]) -> str:
        if (text := found.groupdict().get("marked")) is not None:
            return json.dumps(text)
        if found["json"] is not None:
            return found[0]
        if found["python"] is not None:
            return json.dumps(read_python_value(found[0]))
        word = found[0].strip()
        return _PYTHON_WORDS.get(word) or (word if _is_json(word) else json.dumps(word))

    return regex.sub(pattern, standard, text, flags=regex.DOTALL)


def _is_json(text: str) -> bool:
    try:
        strict_json(text)
    except ValueError:
        return False
    return True


# a whole string, or a key that has no quotes
_STRING_OR_KEY = regex.compile(r'"(?:\\.|[^"\\])*+"|(?<=[{,]\s*)[^\s"{}\[\],:][^"{}\[\],:]*(?=:)')


def _standard_json(text: str, args: Arguments) -> str:
    """The text of a dialect in standard JSON."""
    pairs = [tuple(pair) for pair in args.get("string_delims", ())]
    if pairs:
        marked = "|".join(f"{regex.escape(a)}(.*?){regex.escape(b)}" for a, b in pairs)
        found = regex.compile(f'("(?:\\\\.|[^"\\\\])*+")|{marked}', regex.DOTALL)
        text = found.sub(
            lambda m: m[1] or json.dumps(next(g for g in m.groups()[1:] if g is not None)), text
        )
    if args.get("unquoted_keys"):
        text = _STRING_OR_KEY.sub(
            lambda m: m[0] if m[0].startswith('"') else json.dumps(m[0].strip()), text
        )
    return text


def _read_tags(text: str, args: Arguments) -> dict[str, Any]:
    """An object of tags: ``tag_pattern`` has the groups ``key`` and ``value``; ``value_parser``
    names the reader of values; with ``merge_duplicates`` a repeated key has a list.
    """
    found: dict[str, list[Any]] = {}
    for tag in regex.finditer(args["tag_pattern"], text, regex.DOTALL, timeout=1.0):
        found.setdefault(tag["key"], []).append(_inner(tag["value"] or "", args))
    merges = args.get("merge_duplicates")
    return {
        key: values if merges and len(values) > 1 else values[-1] for key, values in found.items()
    }


def _read_lines(text: str, args: Arguments) -> dict[str, Any]:
    """An object of lines, each a key, ``kv_sep`` and a value."""
    separator = args.get("kv_sep", ":")
    lines = (line.partition(separator) for line in text.split(args.get("line_sep", "\n")))
    return {
        key.strip(): _inner(_read_text(value, args), args) for key, found, value in lines if found
    }


def _inner(text: str, args: Arguments) -> Any:
    parser = args.get("value_parser")
    return READERS[parser.get("name", "text")](text, parser.get("args", {})) if parser else text


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "text": _read_text,
        "json-string": _read_json_string,
        "int": lambda text, args: int(text),
        "float": lambda text, args: float(text),
        "bool": _read_bool,
        "json": _read_json,
        "xml-inline": _read_tags,
        "kv-lines": _read_lines,
        "python-call-list": lambda text, args: read_python_calls(text),
    }
)
STREAMED = ("text", "json-string")  # readers of a text in pieces
TEXTUAL = ("xml-inline", "kv-lines")  # readers whose values are text, to be read by the schema


def read_calls(
    text: str,
    reader: str,
    args: Arguments,
    *,
    transform: Any = None,
    transform_each: bool = False,
    captures: Mapping[str, str] = MappingProxyType({}),
    tools: Mapping[str, Mapping[str, Any]],
) -> list[Call]:
    """The calls in the text of a part; raises ``ValueError`` if it holds none that is valid.

    ``captures`` are the named groups of the part's anchors, ``tools`` the schema of each tool's
    parameters: it decides the types of values that are written without quotes.
    """
    value = READERS[reader](text, args)
    if transform is not None:
        if transform_each and not isinstance(value, list):
            raise ValueError("the calls are no list")
        scopes = (
            [{**captures, **item} for item in cast("list[Any]", value) if isinstance(item, Mapping)]
            if transform_each
            else [{**captures, "content": value}]
        )
        value = [_filled(transform, scope) for scope in scopes]
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    while len(items) == 1 and isinstance(items[0], list):
        items = cast("list[Any]", items[0])
    if not items:
        raise ValueError("no call")
    return [_call(item, tools, reader) for item in items]


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """A transform with each ``"{name}"`` or ``"{name.key}"`` replaced by the value of that name."""
    if isinstance(transform, Mapping):
        entries = cast("Mapping[str, Any]", transform)
        return {key: _filled(inner, scope) for key, inner in entries.items()}
    if isinstance(transform, list):
        return [_filled(inner, scope) for inner in cast("list[Any]", transform)]
    if not isinstance(transform, str) or not (found := regex.fullmatch(r"\{([\w.]+)\}", transform)):
        return transform
    value: Any = scope
    for name in found[1].split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"{name} is missing")
        value = cast("Mapping[str, Any]", value)[name]
    return value


def _call(item: Any, tools: Mapping[str, Mapping[str, Any]], reader: str) -> Call:
    """One call in any of the forms that models write."""
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError("a call is no object")
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters", ...))
    if isinstance(arguments, str):
        arguments = strict_json(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise ValueError("a call has no name, or its arguments are no object")
    if reader in TEXTUAL:
        schema = tools.get(name, {})
        properties = schema.get("properties")
        described = cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}
        arguments = {
            key: typed(value, described[key], schema) if key in described else value
            for key, value in arguments.items()
        }
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # half of a surrogate pair is a ValueError
    return Call(name, text)
