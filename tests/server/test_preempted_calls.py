"""Calls and forms of chats that are preempted while they stream are those of chats alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kit.api_calls import CHATS, ask, events
from kit.scripted import scripted_engine
from kit.server import serving

NUM_PAGES = 82  # of 16 tokens; each of the chats with tools takes 60 or more
ITEMS = [f"item {number}" for number in range(24)]
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string"}}},
    "required": ["items"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "save", "parameters": SCHEMA}}]
ARGUMENTS = json.dumps({"items": ITEMS})
CALL = f'{{"name": "save", "arguments": {ARGUMENTS}}}'
TAGS = f"<arg_key>items</arg_key>\n<arg_value>{json.dumps(ITEMS)}</arg_value>"
# by template: what its model says; a call in the generic form, in JSON, and in tags after thoughts
SAID = {
    "smollm2": CALL,
    "qwen2.5": f"<tool_call>\n{CALL}\n</tool_call>",
    "glm-4.6": f"<think>hm</think><tool_call>save\n{TAGS}\n</tool_call>",
}


def streamed_call(lines: list[Any]) -> tuple[str, Any]:
    name, arguments = "", ""
    for chunk in lines:
        for call in chunk["choices"][0]["delta"].get("tool_calls") or ():
            assert call["index"] == 0
            name += call["function"].get("name") or ""
            arguments += call["function"].get("arguments") or ""
    return name, json.loads(arguments)


@pytest.mark.parametrize("template", SAID)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_preempted_calls(template: str, choice: str) -> None:
    engine, device = scripted_engine(template, num_pages=NUM_PAGES)
    device.speak(SAID[template])
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 500}

    def call(number: int) -> tuple[str, Any]:
        question = {"role": "user", "content": f"{number}: save the items"}
        body = {"messages": [question], **fields}
        if number % 2:
            return streamed_call(events(server.post(CHATS, stream=True, **body)))
        (found,) = ask(server, CHATS, **body)["choices"][0]["message"]["tool_calls"]
        return found["function"]["name"], json.loads(found["function"]["arguments"])

    with serving(engine) as server, ThreadPoolExecutor(4) as threads:
        assert [*threads.map(call, range(4))] == [("save", {"items": ITEMS})] * 4
        assert engine.stats().num_preemptions > 0


def test_a_preempted_form_after_thoughts() -> None:
    engine, device = scripted_engine("qwen3", num_pages=NUM_PAGES // 2)
    device.speak(f"<think>hm</think>{ARGUMENTS}")
    form = {"type": "json_schema", "json_schema": {"name": "items", "schema": SCHEMA}}

    def content(number: int) -> Any:
        question = {"role": "user", "content": f"{number}: list the items"}
        body = {"messages": [question], "response_format": form, "max_tokens": 500}
        message = ask(server, CHATS, **body)["choices"][0]["message"]
        return message["reasoning"], json.loads(message["content"])

    with serving(engine) as server, ThreadPoolExecutor(4) as threads:
        assert [*threads.map(content, range(4))] == [("hm", {"items": ITEMS})] * 4
        assert engine.stats().num_preemptions > 0
