"""Chats with histories and tools, and what templates make of them: ``python -m``.

Owns: ``CHATS``, and ``outcome`` of a chat in a template. The command takes files or folders of
templates and prints each chat that a template does not render whole, and a count at the end.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.chat import ChatTemplate

SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
INTERNAL = (  # words of Jinja's and Python's own errors
    *("has no attribute", "is undefined", "object is not", "can only concatenate", "must be str"),
    *("not iterable", "unsupported operand", "NoneType", "no element", "Undefined", "takes "),
    *("not JSON serializable", "is not callable", "got an unexpected", "string indices"),
)
ID, OTHER_ID = "abcdefghi", "jklmnopqr"  # of the nine characters that Mistral's templates demand


@dataclass(frozen=True)
class Chat:
    """A chat, and the texts of it that its prompt must contain: not its thoughts, which templates
    leave out of most prompts by design.
    """

    messages: Sequence[Mapping[str, Any]]
    words: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Outcome:
    """``kind``: rendered, dropped (words that the prompt lacks), refused, or internal: an error in
    the words of Jinja.
    """

    kind: str
    details: str = ""


def user(text: Any = "QUESTION") -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def answer(text: Any = "ANSWER", **fields: Any) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text, **fields}


def call(
    name: str = "look_up", arguments: Any = '{"city": "PARIS"}', call_id: str = ID
) -> dict[str, Any]:
    """A tool call."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def calling(*calls: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """An assistant's message with calls."""
    return {"role": "assistant", **fields, "tool_calls": list(calls or (call(),))}


def result(text: Any = "RESULT", call_id: str = ID) -> dict[str, Any]:
    """A tool's message."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def parts(*texts: str) -> list[dict[str, str]]:
    """A content in parts."""
    return [{"type": "text", "text": text} for text in texts]


def function(name: str = "look_up", **fields: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": name, **fields}}


def object_with(**properties: Any) -> dict[str, Any]:
    """A schema of an object."""
    return {"type": "object", "properties": properties}


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "PLACE"}},
    "required": ["city"],
}
NESTED = {
    "type": "object",
    "$defs": {"Leg": {"type": "object", "properties": {"km": {"type": "number"}}}},
    "properties": {
        "legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}},
        "mode": {"enum": ["BUS", "TRAIN"]},
        "when": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "TIME"},
        "size": {"type": ["integer", "null"]},
        "deep": {"type": "object", "properties": {"inner": {"type": "boolean"}}},
        "free": {},
    },
}
FULL = function(description="DESCRIPTION", parameters=PARAMETERS)
AFTER = (result(), answer(), user("NEXT"))
AFTER_WORDS = ("RESULT", "ANSWER", "NEXT")
CALLED = ("QUESTION", "look_up", "PARIS")


def _after_call(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [user(), dict(message), *map(dict, AFTER)]


def _guidance() -> Iterator[tuple[str, Chat]]:
    system = {"role": "system", "content": "GUIDANCE"}
    second = {"role": "system", "content": "MORE"}
    developer = {"role": "developer", "content": "DEVELOPED"}
    yield "user", Chat([user()], ["QUESTION"])
    yield "turns", Chat([user(), answer(), user("NEXT")], ["QUESTION", "ANSWER", "NEXT"])
    yield "system", Chat([system, user()], ["GUIDANCE", "QUESTION"])
    yield "developer", Chat([developer, user()], ["DEVELOPED", "QUESTION"])
    both = ["GUIDANCE", "DEVELOPED", "QUESTION"]
    yield "system, developer", Chat([system, developer, user()], both)
    yield "developer, system", Chat([developer, system, user()], both)
    yield "two systems", Chat([system, second, user()], ["GUIDANCE", "MORE", "QUESTION"])
    in_parts = {**system, "content": parts("GUIDANCE")}
    yield "system in parts, developer", Chat([in_parts, developer, user()], both)
    later = ["QUESTION", "ANSWER", "DEVELOPED", "NEXT"]
    yield (
        "developer in the middle",
        Chat([user(), answer(), developer, user("NEXT")], later),
    )
    yield (
        "system in the middle",
        Chat([system, user(), answer(), second, user("NEXT")], ["GUIDANCE", "MORE", "NEXT"]),
    )
    yield "system at the end", Chat([user(), second], ["QUESTION", "MORE"])
    yield "two users", Chat([user(), user("NEXT")], ["QUESTION", "NEXT"])
    chat = [user(), answer(), answer("OTHER"), user("NEXT")]
    yield "two answers", Chat(chat, ["QUESTION", "ANSWER", "OTHER", "NEXT"])
    yield "answer first", Chat([answer(), user()], ["ANSWER", "QUESTION"])
    yield "system and tools", Chat([system, user()], ["GUIDANCE", "look_up"], [FULL])
    yield "developer and tools", Chat([developer, user()], ["DEVELOPED", "look_up"], [FULL])


def _calls() -> Iterator[tuple[str, Chat]]:
    for tools in ((FULL,), ()):
        beside = ", tools" if tools else ""
        for name, fields in (
            ("null", {"content": None}),
            ("absent", {}),
            ("empty", {"content": ""}),
            ("no parts", {"content": []}),
        ):
            chat = _after_call(calling(**fields))
            yield f"call, content {name}{beside}", Chat(chat, [*CALLED, *AFTER_WORDS], tools)
        for name, fields, words in (
            ("text", {"content": "LOOKING"}, ["LOOKING"]),
            ("text in parts", {"content": parts("LOOKING", "THERE")}, ["LOOKING", "THERE"]),
        ):
            chat = _after_call(calling(**fields))
            yield f"call and {name}{beside}", Chat(chat, [*CALLED, *words, *AFTER_WORDS], tools)
            yield (
                f"call and {name}, last{beside}",
                Chat(chat[:3], [*CALLED, *words, "RESULT"], tools),
            )
        for name in ("reasoning_content", "reasoning", "thinking"):
            chat = _after_call(calling(**{name: "HMM"}))
            yield (
                f"call and {name}{beside}",
                Chat(chat, [*CALLED, *AFTER_WORDS], tools),
            )
        chat = _after_call(calling(content="LOOKING", reasoning_content="HMM"))
        words = [*CALLED, "LOOKING", *AFTER_WORDS]
        yield f"call, text, thoughts{beside}", Chat(chat, words, tools)
        last = Chat(chat[:3], [*CALLED, "LOOKING", "RESULT"], tools)
        yield f"call, text, thoughts, last{beside}", last
        yield f"call, result last{beside}", Chat(chat_of_call()[:3], [*CALLED, "RESULT"], tools)
        calls = (call(), call("count_up", {"size": "NINE"}, OTHER_ID))
        results = (result(), result("OTHER", OTHER_ID))
        words = [*CALLED, "count_up", "NINE", "RESULT", "OTHER"]
        both = (*tools, *([function("count_up", **_described())] if tools else ()))
        chat = [user(), calling(*calls), *results]
        yield f"two calls, last{beside}", Chat(chat, words, both)
        chat = [user(), calling(*calls), *reversed(results)]
        yield f"two calls, results reversed{beside}", Chat(chat, words, both)
        chat = [user(), calling(*calls, content="LOOKING"), *results, answer(), user("NEXT")]
        yield f"two calls and text{beside}", Chat(chat, [*words, "LOOKING", "NEXT"], both)
        chat = [user(), calling(calls[0]), results[0], calling(calls[1]), results[1]]
        yield f"call after call{beside}", Chat(chat, words, both)
        chat = [*chat, answer(), user("NEXT")]
        yield f"call after call, then text{beside}", Chat(chat, [*words, "ANSWER", "NEXT"], both)
        chat = [user(), calling(), result(parts("RESULT", "REST"))]
        yield f"result in parts{beside}", Chat(chat, [*CALLED, "RESULT", "REST"], tools)
        chat = [user(), calling(), {**result(), "name": "look_up"}]
        yield f"result with a name{beside}", Chat(chat, [*CALLED, "RESULT"], tools)
        chat = [user(), calling(), result(), user("NEXT")]
        yield f"result and text{beside}", Chat(chat, [*CALLED, "RESULT", "NEXT"], tools)
        yield f"empty result{beside}", Chat([user(), calling(), result("")], CALLED, tools)


def chat_of_call() -> list[dict[str, Any]]:
    """A call, its result, an answer and a question."""
    return _after_call(calling(content=None))


def _described() -> dict[str, Any]:
    return {"description": "COUNTS", "parameters": PARAMETERS}


def _contents() -> Iterator[tuple[str, Chat]]:
    for name, arguments, words in (
        ("empty", "", ["look_up"]),
        ("null", None, ["look_up"]),
        ("no object", "{}", ["look_up"]),
        ("an object", {"city": "PARIS"}, CALLED),
        ("nested", '{"legs": [{"km": 1.5}], "ok": true, "no": null}', ["look_up", "legs", "1.5"]),
    ):
        chat = _after_call(calling(call(arguments=arguments), content=None))
        yield f"arguments {name}", Chat(chat, [*words, *AFTER_WORDS], [FULL])
    for role in ("system", "user", "assistant"):
        chat = [{"role": "system", "content": "GUIDANCE"}, user(), answer(), user("NEXT")]
        chat = [
            {**one, "content": parts("FIRST", "REST")} if one["role"] == role else one
            for one in chat
        ]
        yield f"{role} in parts", Chat(chat, ["FIRST", "REST"])
    thinking = answer(reasoning_content="HMM")
    chat = [user(), thinking, user("NEXT")]
    yield "thoughts, then a question", Chat(chat, ["ANSWER"])
    for name, fields in (("null", {"content": None}), ("absent", {}), ("empty", {"content": ""})):
        silent = {"role": "assistant", **fields}
        yield f"answer {name}", Chat([user(), silent, user("NEXT")], ["QUESTION", "NEXT"])
        yield (
            f"answer {name}, thoughts",
            Chat([user(), {**silent, "reasoning_content": "HMM"}, user("NEXT")], ["NEXT"]),
        )
    yield "calls empty", Chat([user(), answer(tool_calls=[]), user("NEXT")], ["ANSWER", "NEXT"])


def _tools() -> Iterator[tuple[str, Chat]]:
    described = {"description": "DESCRIPTION"}
    for name, tool, words in (
        ("whole", FULL, ["look_up", "DESCRIPTION", "city", "PLACE"]),
        ("no description", function(parameters=PARAMETERS), ["look_up", "city"]),
        ("description null", function(description=None, parameters=PARAMETERS), ["city"]),
        ("description empty", function(description="", parameters=PARAMETERS), ["city"]),
        ("no parameters", function(**described), ["look_up", "DESCRIPTION"]),
        ("name alone", function(), ["look_up"]),
        ("parameters null", function(**described, parameters=None), ["look_up"]),
        ("parameters {}", function(**described, parameters={}), ["look_up"]),
        (
            "parameters {type}",
            function(**described, parameters={"type": "object"}),
            ["look_up", "DESCRIPTION"],
        ),
        (
            "parameters {type, properties {}}",
            function(**described, parameters={"type": "object", "properties": {}}),
            ["look_up", "DESCRIPTION"],
        ),
        (
            "parameters without type",
            function(**described, parameters={"properties": {"city": {"type": "string"}}}),
            ["look_up", "city"],
        ),
        (
            "parameters without required",
            function(**described, parameters={**PARAMETERS, "required": []}),
            ["look_up", "city"],
        ),
        (
            "property without description",
            function(**described, parameters=object_with(city={"type": "string"})),
            ["look_up", "city"],
        ),
        (
            "property without type",
            function(**described, parameters=object_with(city={"enum": ["A"]})),
            ["look_up", "city"],
        ),
        (
            "property of two types",
            function(
                **described,
                parameters=object_with(city={"type": ["string", "null"]}),
            ),
            ["look_up", "city"],
        ),
        ("strict", function(**described, parameters=PARAMETERS, strict=True), ["look_up", "city"]),
        ("nested", function(**described, parameters=NESTED), ["legs", "BUS", "TIME", "inner"]),
    ):
        yield f"tool: {name}", Chat([user()], ["QUESTION", *words], [tool])
    bare = {"name": "look_up", "description": "DESCRIPTION", "parameters": PARAMETERS}
    yield "tool: without type", Chat([user()], ["look_up"], [{"function": bare}])
    two = [FULL, function("count_up")]
    yield "two tools, one bare", Chat([user()], ["look_up", "count_up"], two)


CHATS: Mapping[str, Chat] = {
    name: chat for group in (_guidance, _calls, _contents, _tools) for name, chat in group()
}


def has_calls(chat: Chat) -> bool:
    """True if an answer of the chat has tool calls."""
    return any(message.get("tool_calls") for message in chat.messages)


def outcome(template: ChatTemplate, chat: Chat) -> Outcome:
    """The prompt that the template makes of a chat."""
    tools = [json.loads(json.dumps(tool)) for tool in chat.tools]
    try:
        prompt = template.render(chat.messages, variables={"tools": tools} if tools else {})
    except (RequestError, TokenizerError) as error:
        is_internal = any(words in str(error) for words in INTERNAL)
        return Outcome("internal" if is_internal else "refused", str(error))
    missing = [words for words in chat.words if words not in prompt]
    if not missing and '\\"city' in prompt:
        return Outcome("dropped", "arguments are text within text")
    return Outcome("dropped", ", ".join(missing)) if missing else Outcome("rendered")


def compiled(path: Path) -> ChatTemplate:
    """The template in a file."""
    return ChatTemplate(path.read_text("utf-8"), special_tokens=SPECIAL_TOKENS)


def main(paths: Sequence[str]) -> None:
    """Print each chat that is not rendered whole, by template."""
    totals: Counter[str] = Counter()
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.glob("*.jinja")) if path.is_dir() else [path])
    ]
    for file in files:
        template = compiled(file)
        renders = template.renders
        has = [name for name, value in renders._asdict().items() if value]
        print(f"{file.stem}: {', '.join(has) or 'no tools'}")
        for name, chat in CHATS.items():
            if chat.tools and not renders.tools:
                totals["no tools"] += 1
                continue
            if has_calls(chat) and not renders.calls:
                totals["no calls"] += 1
                continue
            found = outcome(template, chat)
            totals[found.kind] += 1
            if found.kind != "rendered":
                print(f"    {found.kind:9}{name}: {found.details[:200]}")
    print(f"{len(files)} templates x {len(CHATS)} chats: {dict(totals)}")


if __name__ == "__main__":
    main(sys.argv[1:])
