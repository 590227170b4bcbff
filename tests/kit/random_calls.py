"""Random tools, and calls of them as models write them in each format: ``drawn``, ``written``."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from jaxinfer.text.answers.formats import AnswerFormat, CallText

WORDS = (
    *("a", "Zürich", "日本", "🌸", "x y", '"', "'", "\\", "\n", "\t", "  ", "{", "}", "[", "]"),
    *(",", ":", "=", "<b>", "</b>", "```", "\\n", "null", "7", "; ", "|", "<", "&amp;", "(", ")"),
)
TYPES = ("string", "string", "integer", "number", "boolean", "array", "object", "enum", "nullable")


class Drawn(NamedTuple):
    """Tools (the schema of each one's parameters), and calls of them."""

    tools: dict[str, Any]
    calls: tuple[tuple[str, dict[str, Any]], ...]


def drawn(seed: int) -> Drawn:
    """Tools and one to three calls, the same for the same seed."""
    draw = random.Random(seed)
    tools = {f"tool_{number}": _schema(draw) for number in range(draw.randint(1, 3))}
    names = draw.choices(list(tools), k=draw.choice([1, 1, 2, 3]))
    return Drawn(tools, tuple((name, _arguments(draw, tools[name])) for name in names))


def _schema(draw: random.Random) -> dict[str, Any]:
    names = ("path", "text", "size", "Ort", "n1", "_x", "mode", "größe")
    keys = draw.sample(names, draw.randint(0, 5))
    return {"type": "object", "properties": {key: _type(draw) for key in keys}}


def _type(draw: random.Random) -> dict[str, Any]:
    match draw.choice(TYPES):
        case "enum":
            return {"enum": ["c", "fahren heit", 3]}
        case "nullable":
            return {"anyOf": [{"type": "integer"}, {"type": "null"}]}
        case name:
            return {"type": name}


def _arguments(draw: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema["properties"]
    keys = draw.sample(list(properties), draw.randint(0, len(properties)))
    return {key: _value(draw, properties[key]) for key in keys}


def _value(draw: random.Random, schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return draw.choice(schema["enum"])
    match schema.get("type"):
        case "string":
            return "".join(draw.choices(WORDS, k=draw.randint(0, 12)))
        case "integer":
            return draw.randint(-(10**6), 10**18)
        case "number":
            return draw.choice([0.5, -1e-7, 12345.678, 3])
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return [_any(draw, 2) for _ in range(draw.randint(0, 3))]
        case "object":
            keys = draw.sample(("a", "b_c", "d9"), draw.randint(0, 3))
            return {key: _any(draw, 2) for key in keys}
        case _:
            return draw.choice([None, 3])


def _any(draw: random.Random, depth: int) -> Any:
    kinds = ("string", "integer", "number", "boolean", "null", *("array", "object") * (depth > 0))
    match draw.choice(kinds):
        case "array":
            return [_any(draw, depth - 1) for _ in range(draw.randint(0, 2))]
        case "object":
            return {"k": _any(draw, depth - 1)}
        case kind:
            return _value(draw, {"type": kind})


def written(found: AnswerFormat, drawn: Drawn) -> str:
    """The calls as a model with this format writes them."""
    calls = found.calls
    assert calls is not None
    listed = [_call(calls, number, *one) for number, one in enumerate(drawn.calls)]
    return calls.before + calls.separator.join(listed) + calls.after


def _call(calls: CallText, number: int, name: str, arguments: dict[str, Any]) -> str:
    begin = calls.begin.replace("{name}", name).replace("{index}", str(number))
    match calls.style:
        case "tags":
            body = "".join(_tag(calls, key, value) for key, value in arguments.items())
        case "pairs":
            pairs = [f"{key}{calls.key_end}{_paired(calls, one)}" for key, one in arguments.items()]
            body = calls.argument_separator.join(pairs)
        case _:
            body = json.dumps(arguments, ensure_ascii=number % 2 == 0)
    return begin + body + calls.end


def _tag(calls: CallText, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    begin = calls.argument_begin.replace("{name}", key)
    begin = begin.replace("{string}", "true" if is_text else "false")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return begin + text + calls.argument_end.replace("{name}", key)


def _paired(calls: CallText, value: Any) -> str:
    if not calls.quotes:
        return repr(value)
    if isinstance(value, str):
        return calls.quotes[0] + value + calls.quotes[1]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_paired(calls, one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_paired(calls, one) for one in value) + "]"
    return json.dumps(value)
