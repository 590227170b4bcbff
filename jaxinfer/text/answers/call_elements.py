"""Values of arguments that are elements: those of objects and lists have elements within them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import regex

from jaxinfer.text.answers.argument_types import schemas_of, typed, types_of
from jaxinfer.text.answers.strict_json import strict_json

_ITEM = "item"  # the name of the elements of a list
_MOST_LEVELS = 64


class Element(NamedTuple):
    """The content of an element: its text, and the elements in it with their names."""

    text: str
    children: tuple[tuple[str, Element], ...] = ()


def element_value(text: str, mark: str, schema: Any, root: Any) -> Any:
    """The value that the text within an element is, by its JSON schema, None if there is none.

    ``mark`` is before each tag, ``root`` the document of the schema's references. Text in which
    elements do not fit is a text.
    """
    begins = regex.compile(regex.escape(mark) + r"<(?P<key>[^/<>\n][^<>\n]*)>")
    try:
        element, _ = _read(text, 0, None, begins, mark, 0)
    except ValueError:
        element = Element(text)
    return _value(element, schema, root)


def _read(
    text: str, at: int, name: str | None, begins: regex.Pattern[str], mark: str, level: int
) -> tuple[Element, int]:
    """The element at this place, up to the tag that ends it, and the place behind that; without a
    name up to the end of the text. Raises ``ValueError`` for elements that do not fit.
    """
    if level > _MOST_LEVELS:
        raise ValueError("too many elements within each other")
    end = None if name is None else f"{mark}</{name}>"
    children: list[tuple[str, Element]] = []
    start, own = at, ""
    while True:
        place = text.find(mark, at)
        if place < 0:
            if end is not None:
                raise ValueError(f"{name} has no end")
            place = len(text)
        own += text[at:place]
        if place == len(text) or (end is not None and text.startswith(end, place)):
            if children and own.strip():
                raise ValueError("text is between elements")
            return Element(text[start:place], tuple(children)), place + len(end or "")
        found = begins.match(text, place)
        if found is None:
            raise ValueError("a tag fits no element")
        child, at = _read(text, found.end(), found["key"], begins, mark, level + 1)
        children.append((found["key"], child))


def _value(element: Element, schema: Any, root: Any) -> Any:
    types = () if schema is None else types_of(schema, root)
    if not element.children or (types and not {"array", "object"} & {*types}):
        return _leaf(element.text, types, schema, root)
    is_list = all(name == _ITEM for name, _ in element.children) and "object" not in types
    if is_list or types == ("array",):
        items = _keyword(schema, "items", root)
        return [_value(one, items, root) for _, one in element.children]
    described = _keyword(schema, "properties", root) or {}
    made: dict[str, list[Any]] = {}
    for name, one in element.children:
        made.setdefault(name, []).append(_value(one, described.get(name), root))
    return {name: own[0] if len(own) == 1 else own for name, own in made.items()}


def _leaf(text: str, types: tuple[str, ...], schema: Any, root: Any) -> Any:
    if not text.strip() and "string" not in types:  # an empty list or object has no elements
        for name, empty in (("array", list[Any]), ("object", dict[str, Any])):
            if name in types:
                return empty()
    if types:
        return typed(text, schema, root)
    try:
        return strict_json(text)
    except ValueError:
        return text


def _keyword(schema: Any, keyword: str, root: Any) -> Any:
    """The first value of a keyword of a schema, or of those that it combines."""
    found = (one.get(keyword) for one in schemas_of(schema, root))
    return next((cast("Mapping[str, Any]", one) for one in found if isinstance(one, Mapping)), None)
