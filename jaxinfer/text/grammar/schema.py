"""Checks of a JSON schema that llguidance does not make: its depth, and whether it ever ends.

Their time is proportional to the size of the schema.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD, MAX_REGEX_BYTES, MAX_SCHEMA_DEPTH

# Schemas within each other, references followed. llguidance takes up to 5 KB of stack for each. 300
# definitions that refer to each other at random are 300 deep.
MAX_REFERENCE_DEPTH = 1500
# Characters up to which the maxLength of functions that are not strict is enforced: llguidance
# counts them in states. With 20 arguments of 64 characters between tags, or 60 of 130 in JSON, it
# could not follow a call to its end; with 40 of 32 between tags it could.
MAX_LENIENT_LENGTH = 32
_OF_ONE = ("items", "additionalProperties", "additionalItems")  # keywords whose value is a schema
_OF_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of schemas
_OF_NAMED = ("properties", "patternProperties")  # an object of schemas

# keywords that limit the values of a schema and that llguidance does not follow
NOT_FOLLOWED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    }
)


def check_schema(schema: Any, name: str = "json") -> list[Mapping[str, Any]]:
    """The schemas within a schema, those of its references too.

    Raises ``RequestError`` for a schema nested too deeply, with too long a pattern, or that no
    finite text fits; ``name`` is the part of ``structured_outputs`` that it belongs to.
    """
    check_depth(name, schema)
    deepest, found = 0, []
    for depth, one in reached(schema):
        deepest = max(deepest, depth)
        found.append(one)
        _check_patterns(name, one)
    if deepest > MAX_REFERENCE_DEPTH:
        raise RequestError(
            f"{FIELD}.{name} is {deepest} schemas deep, counted through its references, and "
            f"{MAX_REFERENCE_DEPTH} are possible; shorten its chains of $ref"
        )
    if not _ends(schema):
        raise RequestError(
            f"{FIELD}.{name} never ends: every value of the schema contains another one of its "
            "kind; make the property that leads back to it optional, or allow null"
        )
    return found


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


def reached(root: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The schemas that llguidance compiles, each once, with its depth where it is reached first."""
    found: set[int] = set()  # by id, since a schema has several references
    waiting = [(1, root)]
    while waiting:
        depth, schema = waiting.pop()
        if isinstance(schema, str):
            schema = resolved(root, schema)
        if not isinstance(schema, Mapping) or id(schema) in found:
            continue
        found.add(id(schema))
        yield depth, cast("Mapping[str, Any]", schema)
        following = list(_following(cast("Mapping[str, Any]", schema)))
        waiting += [(depth + 1, one) for one in reversed(following)]


def _following(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas directly within a schema, and its reference, a text."""
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            yield value
        elif name in _OF_NAMED and isinstance(value, Mapping):
            yield from (one for one in value.values() if isinstance(one, Mapping))
        elif name in _OF_SEVERAL and isinstance(value, list):
            yield from (one for one in value if isinstance(one, Mapping))
        elif name in _OF_ONE and isinstance(value, Mapping):
            yield value


def _check_patterns(name: str, schema: Mapping[str, Any]) -> None:
    named = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(named if isinstance(named, Mapping) else ())]
    for pattern in patterns:
        size = len(pattern.encode(errors="replace")) if isinstance(pattern, str) else 0
        if size > MAX_REGEX_BYTES:
            raise RequestError(
                f"{FIELD}.{name} has a pattern of {size} bytes; at most {MAX_REGEX_BYTES} are "
                "possible"
            )


def _ends(root: Any) -> bool:
    """True if some finite value fits, as in the test of a grammar for unproductive symbols.

    Schemas that are wrong in another way count as ending: llguidance reports them.
    """
    return id(root) not in endless(root, [root])


def endless(root: Any, schemas: Iterable[Any]) -> set[int]:
    """The ids of those schemas of a document, and of others that they need, that no finite value
    fits.
    """
    circuit = _Endings(root, schemas)
    opened = circuit.opened()
    return {one for one, gate in circuit.gates.items() if not opened[gate]}


class _Endings:
    """A gate for each schema, which opens once a finite value of it is known.

    A gate needs some or all of its inputs: a schema those of its parts, a reference that of its
    target. Each input is looked at once (Dowling and Gallier, Linear-time algorithms for testing
    the satisfiability of propositional Horn formulae, 1984).
    """

    def __init__(self, root: Any, schemas: Iterable[Any]) -> None:
        self._root = root
        self._num_needed: list[int] = []  # inputs of each gate that have to open first
        self._outputs: list[list[int]] = []  # the gates that each one is an input of
        self._open = self._all_of([])
        self.gates: dict[int, int] = {}  # by the id of a schema
        self._unread: list[Mapping[str, Any]] = []
        self._gates_of(schemas)
        while self._unread:
            schema = self._unread.pop()
            self._connect(self.gates[id(schema)], self._parts(schema))

    def opened(self) -> list[bool]:
        """Which gates open. Called once."""
        opening = [gate for gate, needed in enumerate(self._num_needed) if not needed]
        opened = [False] * len(self._num_needed)
        while opening:
            gate = opening.pop()
            opened[gate] = True
            for output in self._outputs[gate]:
                self._num_needed[output] -= 1
                if self._num_needed[output] == 0:
                    opening.append(output)
        return opened

    def _connect(self, gate: int, inputs: list[int]) -> None:
        self._num_needed[gate] = len(inputs)
        for one in inputs:
            self._outputs[one].append(gate)

    def _all_of(self, inputs: list[int]) -> int:
        self._num_needed.append(0)
        self._outputs.append([])
        gate = len(self._outputs) - 1
        self._connect(gate, inputs)
        return gate

    def _any_of(self, inputs: list[int]) -> int:
        gate = self._all_of(inputs)
        self._num_needed[gate] = 1
        return gate

    def _gate_of(self, schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return self._open
        gate = self.gates.get(id(schema))
        if gate is None:
            gate = self.gates[id(schema)] = self._all_of([])
            self._unread.append(cast("Mapping[str, Any]", schema))
        return gate

    def _gates_of(self, schemas: Iterable[Any]) -> list[int]:
        return [self._gate_of(one) for one in schemas]

    def _parts(self, schema: Mapping[str, Any]) -> list[int]:
        """The gates that all have to be open."""
        ref = schema.get("$ref")
        parts = [self._gate_of(resolved(self._root, ref))] if isinstance(ref, str) else []
        parts += self._gates_of(listed(schema.get("allOf")))
        for name in ("anyOf", "oneOf"):
            if choices := listed(schema.get(name)):
                parts.append(self._any_of(self._gates_of(choices)))
        if "enum" in schema or "const" in schema:
            return parts
        types = schema.get("type")
        kinds = [types] if isinstance(types, str) else listed(types)
        # without a type a string fits, whatever the other keywords demand
        if not kinds or any(kind not in ("object", "array") for kind in kinds):
            return parts
        values: list[int] = []
        if "object" in kinds:
            values.append(self._all_of(self._gates_of(_needed_properties(schema))))
        if "array" in kinds:
            values.append(self._all_of(self._gates_of(_needed_items(schema))))
        return [*parts, self._any_of(values)]


def _needed_properties(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the properties that each object has."""
    properties, others = schema.get("properties"), schema.get("additionalProperties", True)
    named = cast("Mapping[str, Any]", properties if isinstance(properties, Mapping) else {})
    required = [name for name in listed(schema.get("required")) if isinstance(name, str)]
    return [named.get(name, others) for name in required]


def _needed_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that each array has, of equal ones one."""
    least = schema.get("minItems", 0)
    first = listed(schema.get("prefixItems"))
    if not isinstance(least, (int, float)) or least <= 0:
        return []
    needed = first[: int(least)]
    return [*needed, schema.get("items", True)] if least > len(first) else needed


def is_long(most: Any) -> bool:
    """True if a text's greatest length is only enforced for strict functions."""
    return isinstance(most, (int, float)) and most > MAX_LENIENT_LENGTH


def resolved(root: Any, ref: str) -> Any:
    """The schema that a reference within the document names; True for any other reference."""
    if not ref.startswith("#"):
        return True
    value = root
    for part in filter(None, unquote(ref[1:]).split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = cast("Mapping[str, Any]", value)[name]
        elif isinstance(value, list) and (item := _item(cast("list[Any]", value), name)):
            value = item[0]
        else:
            return True
    return value


def _item(items: list[Any], name: str) -> list[Any]:
    """The item that a part of a reference names, as a list of one, or none."""
    if not (name.isascii() and name.isdigit()) or len(name) > len(str(len(items))):
        return []
    return items[int(name) : int(name) + 1]


def listed(value: Any) -> list[Any]:
    """A list, or an empty one for any other value."""
    return cast("list[Any]", value) if isinstance(value, list) else []


_DEFINITIONS = ("$defs", "definitions")
_IN_DEFINITIONS = tuple(f"#/{name}/" for name in _DEFINITIONS)
_OF_VALUES = ("const", "default", "enum", "examples")  # keywords whose values are no schemas


def part_of(parent: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema within ``parent`` as a document of its own: it has the parent's definitions, and
    those to which it refers at other places, as zod writes references.
    """
    if "$ref" not in str(schema):
        return schema
    kept = {name: parent[name] for name in _DEFINITIONS if name in parent}
    names: dict[str, str] = {}  # of new definitions by reference
    found: dict[int, tuple[str, Any]] = {}  # by id: several references may name one schema
    waiting: list[Any] = [kept, schema]
    while waiting:
        for ref in _references(waiting.pop()):
            if ref in names or ref.startswith(_IN_DEFINITIONS):
                continue
            target = resolved(parent, ref)
            if id(target) not in found:
                found[id(target)] = f"part_{len(found)}", target
                waiting.append(target)
            names[ref] = found[id(target)][0]
    whole = {**kept, **schema}
    if found:
        whole["$defs"] = {**dict(found.values()), **cast("Any", whole.get("$defs", {}))}
    return _renamed(whole, names)


def _references(value: Any) -> Iterator[str]:
    """The references within the document of a schema and those in it."""
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _references(one)
    elif isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        if isinstance(ref := entries.get("$ref"), str) and ref.startswith("#"):
            yield ref
        for name, one in entries.items():
            if name not in _OF_VALUES:
                yield from _references(one)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A schema whose references are those of these definitions."""
    if isinstance(value, list):
        return [_renamed(one, names) for one in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    entries = cast("Mapping[str, Any]", value)
    made = {
        name: one if name in _OF_VALUES else _renamed(one, names) for name, one in entries.items()
    }
    if isinstance(ref := made.get("$ref"), str) and ref in names:
        made["$ref"] = f"#/$defs/{names[ref]}"
    return made
