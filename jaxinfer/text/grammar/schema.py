"""Checks of a JSON schema that llguidance does not make: its depth, and whether it ever ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast
from urllib.parse import unquote

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD, MAX_SCHEMA_DEPTH


def check_schema(schema: Any, name: str = "json") -> None:
    """Raise ``RequestError`` for a schema nested too deeply, or one that no finite text fits;
    ``name`` is the part of ``structured_outputs`` that it belongs to.
    """
    check_depth(name, schema)
    if not _Endings(schema).ends(schema):
        raise RequestError(
            f"{FIELD}.{name} never ends: every value of the schema contains another one of its "
            "kind; make the property that leads back to it optional, or allow null"
        )


def check_depth(name: str, value: Any) -> None:
    """Raise ``RequestError`` if a JSON value is nested too deeply for recursive functions."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise RequestError(f"{FIELD}.{name} must be nested at most {MAX_SCHEMA_DEPTH} levels deep")


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


class _Endings:
    """Which schemas have a finite value, as in the test of a grammar for unproductive symbols.

    A target of ``$ref`` ends if its schema does while references only count that are known to end;
    repeated until no further one is found. Schemas that are wrong in another way count as ending:
    llguidance reports them.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: set[str] = set()  # references that end
        targets = {ref: resolved(root, ref) for ref in _references(root)}
        found = True
        while found:
            found = False
            for ref, target in targets.items():
                if ref not in self._known and self.ends(target):
                    self._known.add(ref)
                    found = True

    def ends(self, schema: Any) -> bool:
        """True if some finite value fits, as far as references are known to end."""
        if not isinstance(schema, Mapping):
            return True
        schema = cast("Mapping[str, Any]", schema)
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in self._known:
            return False
        if not all(self.ends(one) for one in _listed(schema.get("allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            choices = _listed(schema.get(name))
            if choices and not any(self.ends(one) for one in choices):
                return False
        if "enum" in schema or "const" in schema:
            return True
        types = schema.get("type")
        kinds = [types] if isinstance(types, str) else _listed(types)
        # without a type a string fits, whatever the other keywords demand
        if not kinds or any(kind not in ("object", "array") for kind in kinds):
            return True
        return ("object" in kinds and self._object_ends(schema)) or (
            "array" in kinds and self._array_ends(schema)
        )

    def _object_ends(self, schema: Mapping[str, Any]) -> bool:
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        named = cast("Mapping[str, Any]", properties if isinstance(properties, Mapping) else {})
        required = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        return all(self.ends(named.get(name, others)) for name in required)

    def _array_ends(self, schema: Mapping[str, Any]) -> bool:
        least = schema.get("minItems", 0)
        first = _listed(schema.get("prefixItems"))
        if not isinstance(least, (int, float)) or least <= 0:
            return True
        needed = first[: int(least)]
        if least > len(first):
            needed = [*needed, schema.get("items", True)]
        return all(self.ends(one) for one in needed)


def _references(root: Any) -> set[str]:
    """All ``$ref`` of a schema."""
    found: set[str] = set()
    level = [root]
    while level:
        refs = [one.get("$ref") for one in level if isinstance(one, Mapping)]
        found.update(ref for ref in refs if isinstance(ref, str))
        level = [inner for outer in level for inner in _inner(outer)]
    return found


def resolved(root: Any, ref: str) -> Any:
    """The schema that a reference within the document names; True for any other reference."""
    if not ref.startswith("#"):
        return True
    value = root
    for part in filter(None, unquote(ref[1:]).split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = cast("Mapping[str, Any]", value)[name]
        elif isinstance(value, list) and name.isdigit() and int(name) < len(cast("Any", value)):
            value = cast("list[Any]", value)[int(name)]
        else:
            return True
    return value


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
