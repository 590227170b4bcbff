"""Hostile forms in every field and API while chats stream: no chat may be disturbed for long.

Run from the repository root; the arguments after ``--`` are flags of ``jaxinfer serve``:

    .venv/bin/python -m bench.hostile_forms [--forms 200] [--chats 8] [--at-once 2] -- MODEL

Chains of references and rules, repetitions, long choices, nested tags and other bombs are sent as a
JSON schema, a regex, a choice, a grammar, tags, a pattern of blanks and tools. The report has the
longest wait for a token of each chat before and during the forms, the growth of the engine's
memory, and the status and time of each answer. Exits with 1 unless every answer is a 400 within
3 s, no chat waits 2 s longer than chats do without forms and the engine has grown by at most
300 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.process_tree import tree_memory
from jaxinfer.bench.server_process import ServerProcess

MAX_WAIT, MAX_SECONDS, MAX_GROWTH = 2.0, 3.0, 300 << 20
CHAT_TOKENS = 400
SECONDS_BEFORE = 10.0  # of chats alone
SAMPLING_SECONDS = 0.05  # between two looks at the engine's memory
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
CONVERSATION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
PROMPTS = {
    CHAT: CONVERSATION,
    MESSAGE: CONVERSATION,
    COMPLETION: {"prompt": "hi", "max_tokens": 8},
    RESPONSE: {"input": "hi", "max_output_tokens": 8},
}

type Fields = dict[str, Any]


class Hostile(NamedTuple):
    """A form that must be refused: the kind that it is of, and what it does."""

    kind: str
    what: str
    value: Any


def chain(what: str, link: Callable[[str], Fields], size: int) -> Hostile:
    """A schema whose references lead from one part to the next."""
    parts = {str(number): link(f"#/{number + 1}") for number in range(size)}
    return Hostile("json", f"a chain of {what}", {"$ref": "#/0", **parts, str(size): {}})


def nested(inner: Any, levels: int, wrap: Callable[[Any], Any]) -> Any:
    """A value within so many others."""
    for _ in range(levels):
        inner = wrap(inner)
    return inner


def schemas(salt: int) -> Iterator[Hostile]:
    """JSON schemas; ``salt`` makes them different from those of the round before."""
    links: dict[str, Callable[[str], Fields]] = {
        "references": lambda ref: {"$ref": ref},
        "items": lambda ref: {"items": {"$ref": ref}},
        "properties": lambda ref: {"properties": {"a": {"$ref": ref}}},
        "anyOf": lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]},
        "allOf": lambda ref: {"allOf": [{"$ref": ref}]},
        "oneOf": lambda ref: {"oneOf": [{"$ref": ref}]},
        "prefixItems": lambda ref: {"prefixItems": [{"$ref": ref}], "type": "array"},
        "additionalProperties": lambda ref: {"additionalProperties": {"$ref": ref}},
        "patternProperties": lambda ref: {"patternProperties": {"^a": {"$ref": ref}}},
    }
    for what, link in links.items():
        yield chain(what, link, 1600 + salt)
    values: dict[str, Any] = {
        "a deep schema": nested({}, 140 + salt, lambda inner: {"items": inner}),
        "a schema that never ends": {
            "$ref": "#/$defs/0",
            "$defs": {
                str(number): {
                    "type": "object",
                    "properties": {"a": {"$ref": f"#/$defs/{(number + 1) % 1200}"}},
                    "required": ["a"],
                }
                for number in range(1200)
            },
            "title": str(salt),
        },
        "products of multipleOf": {
            "allOf": [
                {"type": "integer", "multipleOf": number}
                for number in (3, 5, 7, 11, 13, 17, 19, 23, 101 + salt)
            ]
        },
        "overlapping patternProperties": {
            "patternProperties": {f"^a{i}[a-z]+{salt}$": {"type": "null"} for i in range(3000)}
        },
        "many required keys": {"required": [f"k{salt}-{i}" for i in range(18_000)]},
        "a long constant": {"const": f"{salt}" + "x" * 250_000},
        "many prefixItems": {"type": "array", "prefixItems": [{"type": "null"}] * (13_600 - salt)},
        "products of anyOf": {
            "allOf": [{"anyOf": [{"const": i + salt} for i in range(30)]} for _ in range(50)]
        },
        "many ranges": {
            "anyOf": [
                {"type": "number", "minimum": i + 0.12345678, "maximum": 10**15 + i + salt}
                for i in range(2500)
            ]
        },
        "an exploding pattern": {
            "type": "string",
            "pattern": "^" + "(" * 8 + "a" + "{1,9})" * 8 + f"x{{{salt}}}$",
        },
        "a long pattern": {"pattern": f"{salt}" + "a" * 20_000},
        "many patterns": {
            "properties": {
                f"k{i}": {"type": "string", "pattern": f"(a|b)*a(a|b){{{i % 900}}}{salt}"}
                for i in range(3000)
            }
        },
    }
    for what, value in values.items():
        yield Hostile("json", what, value)


def texts(salt: int) -> Iterator[Hostile]:
    """Regexes, choices, grammars and tags."""
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(9000))
    terminals = "\n".join(f'R{i}: "a" R{i + 1}' for i in range(9000))
    doubled = "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(60))
    gbnf = "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(7000))
    regexes = {
        "many optional letters": "[a-z]?" * (2700 - salt),
        "optional letters, and as many letters": "a?" * (5000 - salt) + "a" * (5000 - salt),
        "bounds within bounds": f"(a{{1000}}){{{1000 + salt}}}",
        "a large bound": f"a{{{1_000_000 + salt}}}",
        "an explosion": "(" * 8 + "a" + "{0,9})" * 8 + f"b{{{salt}}}",
        "many groups": "(" * (4000 + salt) + "a" + ")" * (4000 + salt),
        "many classes": "".join(f"[^{chr(97 + i % 26)}]{{0,9}}" for i in range(1500 - salt)),
        "bounded words of any script": r"\w{1,1000}" * (100 + salt),
        "a long regex": "[a-z]?" * (40_000 + salt),
    }
    grammars = {
        "a chain of rules": f'start: r0\n{rules}\nr9000: "b{salt}"',
        "a chain of terminals": f'start: R0\n{terminals}\nR9000: "b{salt}"',
        "terminals that double": f'start: R0\n{doubled}\nR60: "b{salt}"',
        "repetitions of repetitions": f'start: ((("a{{{salt}}}"{{9999}}){{9999}}){{9999}}){{9999}}',
        "parentheses": "start: " + "(" * (9000 + salt) + '"a"' + ")" * (9000 + salt),
        "many optional rules": "start: " + "a? " * (5000 + salt) + '\na: "x"',
        "a chain of rules in GBNF": f'root ::= r0\n{gbnf}\nr7000 ::= "b{salt}"',
        "parentheses in GBNF": "root ::= " + "(" * (3000 + salt) + '"a"' + ")" * (3000 + salt),
        "many choices in GBNF": "root ::= " + " | ".join(f'"a{salt}"' for _ in range(36_000)),
    }
    bomb = {"type": "regex", "pattern": "[a-z]?" * (2600 - salt)}
    many = [
        {"begin": f"<{salt}-{i}>", "content": {"type": "any_text"}, "end": "<"} for i in range(3000)
    ]
    tags: dict[str, Any] = {
        "nested tags": nested(
            {"type": "any_text"},
            140 + salt,
            lambda inner: {"type": "tag", "begin": "a", "content": inner, "end": "b"},
        ),
        "many triggers": {
            "type": "triggered_tags",
            "triggers": [one["begin"] for one in many],
            "tags": many,
        },
        "a tag with a bomb": {"type": "tag", "begin": "<", "content": bomb, "end": ">"},
        "a tag with a chain": {
            "type": "json_schema",
            "json_schema": chain("items", lambda ref: {"items": {"$ref": ref}}, 1700 + salt).value,
        },
    }
    yield from (Hostile("regex", what, value) for what, value in regexes.items())
    yield from (Hostile("grammar", what, value) for what, value in grammars.items())
    yield from (Hostile("structural_tag", what, {"format": one}) for what, one in tags.items())
    yield Hostile("choice", "a long text", [f"{salt}" + "ab " * 80_000])
    yield Hostile("choice", "too many texts", [f"{salt}-{i}" for i in range(17_000)])
    yield Hostile("whitespace_pattern", "many optional blanks", "[ \n]?" * (2500 - salt))


def request_of(form: Hostile, turn: int) -> tuple[str, Fields]:
    """The path and the body of a request with this form, in one of the fields that take it."""
    kind, value = form.kind, form.value
    match kind:
        case "json":
            ways = _ways_of_schemas(value)
        case "structural_tag":
            ways = [
                (CHAT, {"structured_outputs": {kind: value}}),
                (COMPLETION, {"response_format": {"type": kind, **value}}),
            ]
        case "whitespace_pattern":
            any_object = {"type": "object"}
            ways = [
                (CHAT, {"structured_outputs": {"json": any_object, kind: value}}),
                (COMPLETION, {"guided_json": any_object, f"guided_{kind}": value}),
            ]
        case _:
            ways = [
                (CHAT, {"structured_outputs": {kind: value}}),
                (COMPLETION, {f"guided_{kind}": value}),
            ]
    path, fields = ways[turn % len(ways)]
    return path, {**PROMPTS[path], **fields}


def _ways_of_schemas(schema: Fields) -> list[tuple[str, Fields]]:
    of_object = schema.get("type", "object") == "object"  # as arguments are
    one = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    parameters = schema if of_object else one
    function = {"name": "f", "parameters": parameters, "strict": True}
    tool = {"type": "function", "function": function}
    anthropic_tool = {"name": "f", "input_schema": {"type": "object", **parameters}}
    response = {"type": "json_schema", "name": "n", "schema": schema}
    return [
        (CHAT, {"response_format": _format(schema)}),
        (COMPLETION, {"response_format": _format(schema)}),
        (CHAT, {"structured_outputs": {"json": schema}}),
        (COMPLETION, {"guided_json": schema}),
        (RESPONSE, {"text": {"format": response}}),
        (MESSAGE, {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        (CHAT, {"tools": [tool], "tool_choice": "required"}),
        (CHAT, {"tools": [tool]}),
        (RESPONSE, {"tools": [{"type": "function", **function}], "tool_choice": "required"}),
        (MESSAGE, {"tools": [anthropic_tool], "tool_choice": {"type": "any"}}),
    ]


def _format(schema: Any) -> Fields:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def hostile_forms(count: int) -> list[Hostile]:
    """So many forms, no two of which are the same."""
    rounds = (one for salt in range(1, 99) for one in (*schemas(salt), *texts(salt)))
    return list(islice(rounds, count))


class EngineMemory:
    """The largest resident memory of the engine's process, which it looks at again and again."""

    def __init__(self, server: int) -> None:
        self.pid = next(
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if b"jaxinfer.engine.link.child" in _read(path) and _parent(path.parent) == server
        )
        self.first = self.largest = self.now()

    def now(self) -> int:
        """Bytes."""
        return int((Path("/proc") / str(self.pid) / "statm").read_text().split()[1]) * 4096

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.largest = max(self.largest, self.now())
            await asyncio.sleep(SAMPLING_SECONDS)


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _parent(folder: Path) -> int:
    return int(_read(folder / "stat").rpartition(b")")[2].split()[1])


async def stream_chats(
    client: Client, number: int, ended: asyncio.Event, answers: list[Answer]
) -> None:
    """One chat after the other, until the forms are answered."""
    while not ended.is_set():
        prompt = f"Tell me story {number}-{len(answers)}."
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": CHAT_TOKENS}
        body |= {"ignore_eos": True, "stream": True}
        answer = await client.post(CHAT, json.dumps(body).encode())
        if answer.error:
            raise RuntimeError(f"a chat failed: {answer.error}")
        answers.append(answer)


def longest_wait(answers: list[Answer], begin: float, end: float) -> float:
    """The longest part within an interval of the time for a token of these chats."""
    spans = [
        pair
        for answer in answers
        for pair in zip([answer.start, *answer.times], answer.times, strict=False)
    ]
    return max((min(after, end) - max(before, begin) for before, after in spans), default=0.0)


async def fill_pages(client: Client) -> None:
    """Use every page of the KV cache once: on a CPU they are in memory from then on."""
    prompts = [[10 + (number + i) % 30_000 for i in range(900)] for number in range(0, 9000, 900)]
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 1}
        answer = await client.post(COMPLETION, json.dumps(body).encode())
        if answer.error:
            raise RuntimeError(f"a prompt failed: {answer.error}")


async def send_forms(
    client: Client, forms: list[Hostile], at_once: int
) -> list[tuple[Hostile, str, Answer, float]]:
    """Send the forms, so many at a time; returns each with its path, its answer and its seconds."""
    results: list[tuple[Hostile, str, Answer, float]] = []
    numbered = iter(list(enumerate(forms)))

    async def send() -> None:
        for turn, form in numbered:
            path, body = request_of(form, turn)
            data = json.dumps(body).encode()
            start = time.perf_counter()
            answer = await client.post(path, data)
            results.append((form, path, answer, time.perf_counter() - start))

    await asyncio.gather(*(send() for _ in range(at_once)))
    return results


async def measure(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    client, ended = Client(url), asyncio.Event()
    await fill_pages(client)
    chats: list[list[Answer]] = [[] for _ in range(options.chats)]
    streams = asyncio.gather(
        *(stream_chats(client, number, ended, answers) for number, answers in enumerate(chats))
    )
    begin = time.perf_counter()
    await asyncio.sleep(SECONDS_BEFORE)
    memory, forms = EngineMemory(pid), hostile_forms(options.forms)
    watch = asyncio.create_task(memory.watch())
    tree = tree_memory(pid).pss
    start = time.perf_counter()
    results = await send_forms(client, forms, options.at_once)
    end = time.perf_counter()
    watch.cancel()
    ended.set()
    remaining, tree_after = memory.now() - memory.first, tree_memory(pid).pss
    await streams
    client.close()
    return {
        "seconds": round(end - start, 1),
        "load_average": os.getloadavg()[0],  # with that of other programs
        "statuses": Counter(answer.status for _, _, answer, _ in results),
        "longest_answer_seconds": round(max(seconds for *_, seconds in results), 2),
        "longest_wait_of_each_chat_before": [
            round(longest_wait(answers, begin, start), 3) for answers in chats
        ],
        "longest_wait_of_each_chat": [
            round(longest_wait(answers, start, end), 3) for answers in chats
        ],
        "engine_mib": memory.first >> 20,
        "engine_growth_mib": (memory.largest - memory.first) >> 20,
        "engine_growth_that_stays_mib": remaining >> 20,
        "server_growth_that_stays_mib": (tree_after - tree) >> 20,
        "forms": [
            {
                "path": path,
                "kind": form.kind,
                "what": form.what,
                "status": answer.status,
                "seconds": round(seconds, 3),
                "message": _message(answer),
            }
            for form, path, answer, seconds in results
        ],
    }


def _message(answer: Answer) -> str:
    try:
        return json.loads(answer.body)["error"]["message"][:200]
    except (ValueError, KeyError, TypeError):
        return answer.error[:200] or answer.body[:200].decode(errors="replace")


def main() -> None:
    """Start the server, measure, and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forms", type=int, default=200)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=2, help="forms that are sent at a time")
    parser.add_argument("--output", type=Path, help="file of the report")
    parser.add_argument("flags", nargs="*", help="flags of `jaxinfer serve`, after --")
    options = parser.parse_args()
    with ServerProcess(*options.flags, "--tool-call-parser=hermes") as server:
        report = asyncio.run(measure(server.url, server.pid, options))
    report = {**host_circumstances("jaxinfer", "bench"), "flags": options.flags, **report}
    if options.output:
        write_report(options.output, report)
    print(json.dumps(report, indent=1))
    without_forms = max(report["longest_wait_of_each_chat_before"])
    wrong = (
        set(report["statuses"]) != {400}
        or report["longest_answer_seconds"] > MAX_SECONDS
        or max(report["longest_wait_of_each_chat"]) > MAX_WAIT + without_forms
        or report["engine_growth_mib"] > MAX_GROWTH >> 20
    )
    sys.exit(wrong)


if __name__ == "__main__":
    main()
