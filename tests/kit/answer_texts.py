"""Answers as models of eleven formats write them: the texts of messages, by hand-written writers.

The formats are those of the models' chat templates and documents; the cases are of the kinds of
canitoolcall's public fixtures. Owns: ``MESSAGES``, ``WRITERS``, ``TOOLS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import starmap
from typing import Any, NamedTuple

type Calls = tuple[tuple[str, dict[str, Any]], ...]  # names and arguments


class Message(NamedTuple):
    """A message of a model."""

    content: str = ""
    calls: Calls = ()
    reasoning: str = ""


_PROPERTIES = {
    "weather": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "clock": {},
    "save": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "options": {"type": "object"},
        "tags": {"type": "array"},
        "size": {"type": "number"},
        "force": {"type": "boolean"},
        "owner": {"type": ["string", "null"]},
    },
}
TOOLS = {name: {"properties": one} for name, one in _PROPERTIES.items()}
_NESTED = {"options": {"a": {"b": [1, {"c": None}]}, "on": True}, "tags": ["x", "y z"]}
_PLAIN = {"path": "a.txt", "size": -2.5, "force": False, "owner": None}
_ODD = {"path": "C:\\dir\\ß.txt", "text": 'a "quote", {brace}\n  [indent] 日本 🌸\t\\n'}
MESSAGES = {
    "text": Message("Paris is the capital of France. 🇫🇷"),
    "call": Message(calls=(("weather", {"city": "Paris", "days": 3}),)),
    "no arguments": Message(calls=(("clock", {}),)),
    "two calls": Message(calls=(("weather", {"city": "Zürich"}), ("clock", {}))),
    "text and call": Message("I look at it.", (("weather", {"city": "Oslo"}),)),
    "nested": Message(calls=(("save", _NESTED),)),
    "numbers": Message(calls=(("save", _PLAIN),)),
    "odd text": Message(calls=(("save", _ODD),)),
    "thoughts": Message("Hello!", reasoning="A greeting.\n\nNo tool is needed."),
    "thoughts and call": Message("", (("weather", {"city": "Rom"}),), "I need the weather."),
    "all": Message("One moment.", (("clock", {}), ("save", _PLAIN)), "Time, then save."),
}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _think(message: Message) -> str:
    return f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""


def hermes(message: Message) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in message.calls
    ]
    return _think(message) + "\n".join(filter(None, [message.content, *calls]))


def minimax(message: Message) -> str:
    lines = [
        f'{{"name": "{name}", "arguments": {_json(arguments)}}}'
        for name, arguments in message.calls
    ]
    calls = "\n".join(["<tool_calls>", *lines, "</tool_calls>"]) if lines else ""
    return _think(message) + "\n".join(filter(None, [message.content, calls]))


def longcat(message: Message) -> str:
    return re.sub("(?<!longcat_)(?=(tool_call|think)>)", "longcat_", hermes(message))


def qwen3_coder(message: Message) -> str:
    def text_of(value: Any) -> str:
        return value if isinstance(value, str) else _json(value)

    def call(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<parameter={key}>\n{text_of(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    calls = [call(*one) for one in message.calls]
    return _think(message) + "\n".join(filter(None, [message.content, *calls]))


def _in_lines(calls: Calls, begin: str, parameter: str, end: str) -> str:
    """Calls in tags, each value between the tags of its parameter on one line."""

    def value_of(key: str, value: Any) -> str:
        text = value if isinstance(value, str) else _json(value)
        return f"{parameter.format(key)}{text}</parameter>\n"

    return "\n".join(
        begin.format(name) + "".join(starmap(value_of, arguments.items())) + end
        for name, arguments in calls
    )


def seed_oss(message: Message) -> str:
    thoughts = f"<seed:think>{message.reasoning}</seed:think>\n" if message.reasoning else ""
    begin, end = "<seed:tool_call>\n<function={}>\n", "</function>\n</seed:tool_call>"
    calls = _in_lines(message.calls, begin, "<parameter={}>", end)
    return thoughts + "\n".join(filter(None, [message.content, calls]))


def step3(message: Message) -> str:
    begin = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{}">\n'
    end = "</steptml:invoke><｜tool_call_end｜>"
    calls = _in_lines(message.calls, begin, '<steptml:parameter name="{}">', end)
    calls = calls.replace("</parameter>\n", "</steptml:parameter>\n")
    section = f"<｜tool_calls_begin｜>\n{calls}\n<｜tool_calls_end｜>" if calls else ""
    return _think(message) + "\n".join(filter(None, [message.content, section]))


def minimax_m2(message: Message) -> str:
    calls = _in_lines(message.calls, '<invoke name="{}">\n', '<parameter name="{}">', "</invoke>")
    section = f"<minimax:tool_call>\n{calls}\n</minimax:tool_call>" if calls else ""
    return _think(message) + "\n".join(filter(None, [message.content, section]))


def minimax_m3(message: Message) -> str:
    mark = "]<]minimax[>["

    def element(name: str, value: Any) -> str:
        return f"{mark}<{name}>{inner(value)}{mark}</{name}>"

    def inner(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(element(*one) for one in value.items())
        if isinstance(value, list):
            return "".join(element("item", one) for one in value)
        return value if isinstance(value, str) else _json(value)

    calls = [
        f'{mark}<invoke name="{name}">\n'
        + "".join(f"{element(*one)}\n" for one in arguments.items())
        + f"{mark}</invoke>"
        for name, arguments in message.calls
    ]
    section = "\n".join([f"{mark}<tool_call>", *calls, f"{mark}</tool_call>"]) if calls else ""
    thoughts = f"<mm:think>{message.reasoning}</mm:think>" if message.reasoning else ""
    return thoughts + "\n".join(filter(None, [message.content, section]))


def pangu(message: Message) -> str:
    thoughts = f"[unused16]{message.reasoning}[unused17]" if message.reasoning else ""
    calls = _json([{"name": n, "arguments": a} for n, a in message.calls])
    return thoughts + message.content + (f"[unused11]{calls}[unused12]" if message.calls else "")


def cohere_command(message: Message) -> str:
    thoughts = f"<|START_THINKING|>{message.reasoning}<|END_THINKING|>" if message.reasoning else ""
    calls = ",\n    ".join(
        f'{{"tool_call_id": "{i}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'
        for i, (name, arguments) in enumerate(message.calls)
    )
    content = f"<|START_RESPONSE|>{message.content}<|END_RESPONSE|>" if message.content else ""
    return (
        thoughts + content + (f"<|START_ACTION|>[\n    {calls}\n]<|END_ACTION|>" if calls else "")
    )


def apertus(message: Message) -> str:
    thoughts = f"<|inner_prefix|>{message.reasoning}<|inner_suffix|>" if message.reasoning else ""
    calls = ", ".join(f'{{"{name}": {_json(arguments)}}}' for name, arguments in message.calls)
    return (
        thoughts + message.content + (f"<|tools_prefix|>[{calls}]<|tools_suffix|>" if calls else "")
    )


def llama3_json(message: Message) -> str:
    calls = [f'{{"name": "{n}", "parameters": {_json(a)}}}' for n, a in message.calls]
    return "; ".join(calls) or message.content


def mistral(message: Message) -> str:
    thoughts = f"[THINK]{message.reasoning}[/THINK]" if message.reasoning else ""
    if not message.reasoning and len(message.calls) == 2:  # the older form
        calls = _json([{"name": n, "arguments": a} for n, a in message.calls])
        return f"{message.content}[TOOL_CALLS] {calls}"
    calls = "".join(f"[TOOL_CALLS]{n}[ARGS]{_json(a)}" for n, a in message.calls)
    return thoughts + message.content + calls


def deepseek_v3(message: Message) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>"
        for n, a in message.calls
    )
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return _think(message) + message.content + section


def deepseek_v31(message: Message) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{_json(a)}<｜tool▁call▁end｜>"
        for n, a in message.calls
    )
    section = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return _think(message) + message.content + section


def kimi_k2(message: Message) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{_json(a)}"
        "<|tool_call_end|>"
        for i, (n, a) in enumerate(message.calls)
    )
    section = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return _think(message) + message.content + section


def openai(message: Message) -> str:
    parts: list[str] = []
    if message.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{message.reasoning}")
    if message.content:
        channel = "commentary" if message.calls else "final"
        parts.append(f"<|channel|>{channel}<|message|>{message.content}")
    calls = [
        f" to=functions.{n}<|channel|>commentary json<|message|>{_json(a)}"
        if i % 2
        else f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{_json(a)}"
        for i, (n, a) in enumerate(message.calls)
    ]
    text = "<|end|><|start|>assistant".join(parts)
    if calls:
        text += "<|end|><|start|>assistant" if parts else ""
        text += "<|call|><|start|>assistant".join(calls)
    return text  # the last mark ends the answer, so it is not in the text


def gemma4(message: Message) -> str:
    def value(given: Any) -> str:
        if isinstance(given, str):
            return f'<|"|>{given}<|"|>'
        if isinstance(given, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in given.items()) + "}"
        if isinstance(given, list):
            return f"[{','.join(map(value, given))}]"
        return _json(given)

    thoughts = f"<|channel>thought\n{message.reasoning}\n<channel|>" if message.reasoning else ""
    calls = "".join(f"<|tool_call>call:{n}{value(a)}<tool_call|>" for n, a in message.calls)
    return thoughts + message.content + calls


WRITERS: dict[str, Callable[[Message], str]] = {
    writer.__name__: writer
    for writer in (
        *(hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, deepseek_v31, kimi_k2),
        *(openai, gemma4, minimax, longcat, seed_oss, minimax_m2, step3, cohere_command, apertus),
        *(minimax_m3, pangu),
    )
}
# an end of a call in each format, which must not end a call when it is within an argument
END_MARKS = {
    "hermes": "a }\n</tool_call> b",
    "minimax": "a }\n</tool_calls> b",
    "longcat": "a }\n</longcat_tool_call> b",
    "qwen3_coder": "a </parameter> and </function>, <parameter=x> b",
    "seed_oss": "a </parameter> and </function>, <parameter=x> b",
    "minimax_m2": 'a </parameter> and </invoke>, <parameter name="x"> b',
    "minimax_m3": "a ]<]minimax[>[</text> and ]<]minimax[>[</invoke> b",
    "pangu": "a }][unused12] b",
    "step3": "a </steptml:parameter> and </steptml:invoke><｜tool_call_end｜> b",
    "cohere_command": "a }\n]<|END_ACTION|> b",
    "apertus": "a }]<|tools_suffix|> b",
    "llama3_json": 'a "}; {"name" <|python_tag|> b',
    "mistral": 'a "}[TOOL_CALLS]clock[ARGS]{} b',
    "deepseek_v3": "a }\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> b",
    "deepseek_v31": "a }<｜tool▁call▁end｜><｜tool▁calls▁end｜> b",
    "kimi_k2": "a }<|tool_call_end|><|tool_calls_section_end|> b",
    "openai": "a }<|call|><|end|><|start|> b",
    "gemma4": "a }<tool_call|> b",
}
