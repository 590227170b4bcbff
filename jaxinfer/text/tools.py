"""Checks of the tools of a chat, before a template writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jaxinfer.core.errors import RequestError

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")  # of JSON schema
# keywords whose value is a schema or a list of schemas, and those whose value names schemas
_OF_SCHEMAS = (
    *("additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema"),
    *("else", "if", "items", "not", "oneOf", "prefixItems", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_OF_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
MAX_PATH_CHARACTERS = 200  # that an error repeats


class WrongType(NamedTuple):
    """A ``type`` that JSON schema does not have: its path, and why it is refused."""

    path: str
    reason: str


def check_tools(tools: Any) -> None:
    """Raise ``RequestError`` naming the tool whose function has no name, or parameters of an
    unknown type. Tools of other forms are the template's.
    """
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list of tools.")
    for index, tool in enumerate(cast("Sequence[Any]", tools)):
        where = f"tools[{index}].function"
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}] must be an object with type and function.")
        if (function := cast("Mapping[str, Any]", tool).get("function")) is None:
            continue
        if not isinstance(function, Mapping):
            raise RequestError(f"{where} must be an object with name and parameters.")
        fields = cast("Mapping[str, Any]", function)
        name, parameters = fields.get("name"), fields.get("parameters")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name must be the name of a function.")
        if not isinstance(parameters, Mapping | None):
            raise RequestError(f"{where}.parameters must be a JSON schema, an object.")
        if wrong := wrong_type(f"{where}.parameters", parameters):
            raise RequestError(f"{wrong.reason}.")


def wrong_type(where: str, schema: Any) -> WrongType | None:
    """The first ``type`` in a schema at the path ``where`` that JSON schema does not have."""
    waiting = [(where, schema)]
    while waiting:
        path, found = waiting.pop()
        if not isinstance(found, Mapping):
            continue
        one = cast("Mapping[str, Any]", found)
        kinds: Any = one.get("type")
        for kind in cast("list[Any]", kinds) if isinstance(kinds, list) else [kinds]:
            if kind is not None and kind not in TYPES:
                path = f"{path[:MAX_PATH_CHARACTERS]}.type"
                known = f"{', '.join(TYPES[:-1])} or {TYPES[-1]}"
                return WrongType(path, f"{path} {kind!r:.60} is not a type; use {known}")
        waiting += reversed(list(_within(path, one)))
    return None


def _within(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within a schema, with their paths."""
    for name, value in schema.items():
        if name in _OF_SCHEMAS and isinstance(value, list):
            inner = enumerate(cast("list[Any]", value))
            yield from ((f"{path}.{name}[{index}]", one) for index, one in inner)
        elif name in _OF_SCHEMAS:
            yield f"{path}.{name}", value
        elif name in _OF_NAMED and isinstance(value, Mapping):
            named = cast("Mapping[str, Any]", value).items()
            yield from ((f"{path}.{name}.{key}", one) for key, one in named)
