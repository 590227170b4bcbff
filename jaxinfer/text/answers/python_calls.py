"""Calls in Python's syntax, such as ``[get_weather(city="Paris")]`` of Llama 4."""

from __future__ import annotations

import ast
from keyword import iskeyword
from typing import Any

import regex

MAX_CHARACTERS = 1 << 18  # Python's parser takes about 0.3 s for so many


def read_python_calls(text: str) -> list[dict[str, Any]]:
    """The calls as ``{"name", "arguments"}``; raises ``ValueError`` for anything but a list of
    calls with named arguments that are constants, lists and dictionaries.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError("too long")
    try:
        tree = _parsed(text)
        if not isinstance(tree, ast.List):
            raise ValueError("the calls are no list")
        return [_call(item) for item in tree.elts]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def read_python_value(text: str) -> Any:
    """A constant, list or dictionary in Python's syntax; raises ``ValueError`` for others."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError("too long")
    try:
        return _value(_parsed(text))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _parsed(text: str) -> ast.expr:
    # JSON's \/, which Python takes for two characters
    text = regex.sub(r"(\\\\)|\\/", lambda found: found[1] or "/", text)
    return ast.parse(text.strip(), mode="eval").body


def is_python_name(name: str) -> bool:
    """True for the name of a function, or of one in a module."""
    return all(part.isidentifier() and not iskeyword(part) for part in name.split("."))


def _call(item: ast.expr) -> dict[str, Any]:
    if not isinstance(item, ast.Call) or item.args:
        raise ValueError("a call has arguments without names, or is no call")
    name = ast.unparse(item.func)
    arguments = {keyword.arg: _value(keyword.value) for keyword in item.keywords}
    if None in arguments or not is_python_name(name):
        raise ValueError("a call has no plain name or arguments")
    return {"name": name, "arguments": arguments}


def _value(item: ast.expr) -> Any:
    match item:
        case ast.Name(id="true" | "false" | "null" as word):  # JSON's words
            return {"true": True, "false": False, "null": None}[word]
        case ast.List():
            return [_value(inner) for inner in item.elts]
        case ast.Dict():
            keys = [None if key is None else ast.literal_eval(key) for key in item.keys]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError("a key is no string")
            return dict(zip(keys, map(_value, item.values), strict=True))
        case _:
            value = ast.literal_eval(item)
            if not isinstance(value, str | int | float | bool | None):
                raise ValueError("a value has no form in JSON")
            # JSON writes one character beyond 16 bits as two
            return _joined_surrogates(value) if isinstance(value, str) else value


def _joined_surrogates(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
