"""Calls in the four APIs: a stream adds up to the whole answer, also of calls that are cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from jaxinfer.text.answers.formats import answer_format
from kit.random_calls import drawn, written
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

QUESTION = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BARE = '```json\n{"name": "weather", "arguments": {"city": "Oslo"}}\n```'


class Answered(NamedTuple):
    """An answer in any API. Arguments are as they were sent, in Anthropic's and ollama's an object
    as text.
    """

    content: str
    calls: list[tuple[str, str]]
    end: str


class Scripted(NamedTuple):
    """A server whose answers a test gives."""

    server: Serving
    device: ScriptedDevice

    def post(self, path: str, text: str, **fields: Any) -> Any:
        self.device.speak(text)
        answer = self.server.post(path, model="scripted", **fields)
        assert answer.status_code == 200, answer.text
        return answer

    def events(self, path: str, text: str, **fields: Any) -> list[Any]:
        lines = self.post(path, text, stream=True, **fields).text.split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine) as server:
        yield Scripted(server, device)
        server.wait_until_idle()


def chat(scripted: Scripted, text: str, tools: Any, limit: int, **fields: Any) -> list[Answered]:
    listed = [
        {"type": "function", "function": {"name": name, "parameters": one}}
        for name, one in tools.items()
    ]
    path, fields = "/v1/chat/completions", {
        "messages": QUESTION, "tools": listed, "max_tokens": limit, **fields
    }  # fmt: skip
    (choice,) = scripted.post(path, text, **fields).json()["choices"]
    message = choice["message"]
    calls = [one["function"] for one in message.get("tool_calls", ())]
    whole = Answered(
        message["content"] or "",
        [(one["name"], one["arguments"]) for one in calls],
        choice["finish_reason"],
    )
    content, begun, end = "", [], ""
    for event in scripted.events(path, text, **fields):
        for part in event["choices"]:
            content += part["delta"].get("content") or ""
            end = part["finish_reason"] or end
            for one in part["delta"].get("tool_calls", ()):
                if one["index"] == len(begun):
                    begun.append((one["function"]["name"], ""))
                name, arguments = begun[one["index"]]
                begun[one["index"]] = (name, arguments + one["function"]["arguments"])
    return [whole, Answered(content, begun, end)]


def responses(
    scripted: Scripted, text: str, tools: Any, limit: int, **fields: Any
) -> list[Answered]:
    listed = [
        {"type": "function", "name": name, "parameters": one, "strict": False}
        for name, one in tools.items()
    ]
    path, fields = "/v1/responses", {
        "input": "What is the weather?", "tools": listed, "max_output_tokens": limit, **fields
    }  # fmt: skip

    def answered(response: Any, items: list[Any]) -> Answered:
        texts = [
            part["text"] for one in items if one["type"] == "message" for part in one["content"]
        ]
        calls = [one for one in items if one["type"] == "function_call"]
        for call in calls:
            is_whole = call["status"] == "completed"
            assert is_whole or (call is items[-1] and response["status"] == "incomplete")
        return Answered(
            "".join(texts),
            [(one["name"], one["arguments"]) for one in calls],
            response["status"],
        )

    response = scripted.post(path, text, **fields).json()
    events = scripted.events(path, text, **fields)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    for item in items:
        kind = "response.function_call_arguments"
        own = [event for event in events if event.get("item_id") == item["id"]]
        pieces = [event["delta"] for event in own if event["type"] == f"{kind}.delta"]
        ends = [event["arguments"] for event in own if event["type"] == f"{kind}.done"]
        if item["type"] == "function_call":
            assert ["".join(pieces)] == ends == [item["arguments"]]
    return [answered(response, response["output"]), answered(events[-1]["response"], items)]


def messages(
    scripted: Scripted, text: str, tools: Any, limit: int, **fields: Any
) -> list[Answered]:
    listed = [{"name": name, "input_schema": one} for name, one in tools.items()]
    path, fields = "/v1/messages", {
        "messages": QUESTION, "tools": listed, "max_tokens": limit, **fields
    }  # fmt: skip
    answer = scripted.post(path, text, **fields).json()
    blocks = answer["content"]
    whole = Answered(
        "".join(one["text"] for one in blocks if one["type"] == "text"),
        [(one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use"],
        answer["stop_reason"],
    )
    content, calls, end = "", [], ""
    for event in scripted.events(path, text, **fields):
        match event:
            case {"content_block": {"type": "tool_use", "name": name}}:
                calls.append((name, ""))
            case {"delta": {"type": "text_delta", "text": more}}:
                content += more
            case {"delta": {"type": "input_json_delta", "partial_json": more}}:
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case {"delta": {"stop_reason": reason}}:
                end = reason
            case _:
                pass
    return [whole, Answered(content, calls, end)]


def ollama(scripted: Scripted, text: str, tools: Any, limit: int, **fields: Any) -> list[Answered]:
    listed = [
        {"type": "function", "function": {"name": name, "parameters": one}}
        for name, one in tools.items()
    ]
    body = {"messages": QUESTION, "tools": listed, "options": {"num_predict": limit}, **fields}

    def answered(parts: list[Any]) -> Answered:
        calls = [one for part in parts for one in part["message"].get("tool_calls", ())]
        functions = [one["function"] for one in calls]
        assert [one["index"] for one in functions] == [*range(len(functions))]
        return Answered(
            "".join(part["message"]["content"] for part in parts),
            [(one["name"], json.dumps(one["arguments"])) for one in functions],
            parts[-1]["done_reason"],
        )

    whole = scripted.post("/api/chat", text, stream=False, **body).json()
    lines = scripted.post("/api/chat", text, **body).text.splitlines()
    return [answered([whole]), answered([*map(json.loads, lines)])]


APIS = (chat, responses, messages, ollama)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("seed", range(4))
def test_random_calls(scripted: Scripted, api: Any, seed: int) -> None:
    found, one = answer_format("", tool_call_parser="hermes"), drawn(seed)
    assert found is not None
    text = "I look." * (seed % 2) + written(found, one)
    whole, streamed = api(scripted, text, one.tools, 3000)
    for answered in (whole, streamed):
        calls = [(name, json.loads(arguments)) for name, arguments in answered.calls]
        assert (answered.content, calls) == ("I look." * (seed % 2), list(one.calls))
    assert whole.end == streamed.end
    assert api is messages or whole == streamed


@pytest.mark.parametrize(
    ("api", "end"),
    [
        (chat, "length"),
        (responses, "incomplete"),
        (messages, "max_tokens"),
        (ollama, "length"),
    ],
)
def test_calls_that_are_cut_off(scripted: Scripted, api: Any, end: str) -> None:
    """The arguments so far are sent; an object has those that are complete."""
    at = CALL.index("Oslo") + 2
    whole, streamed = api(scripted, CALL, WEATHER, at)
    so_far = Answered("", [("weather", '{"city": "Os')], end)
    complete = Answered("", [("weather", "{}")], end)
    assert streamed == (complete if api is ollama else so_far)
    assert whole == (complete if api in (messages, ollama) else so_far)
    before = api(scripted, CALL, WEATHER, 18)  # no name yet: the text is there
    assert before == [Answered(CALL[:18], [], end)] * 2


@pytest.mark.parametrize("api", [chat, responses, messages])
def test_only_one_call(scripted: Scripted, api: Any) -> None:
    fields = (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        if api is messages
        else {"parallel_tool_calls": False}
    )
    for answered in api(scripted, f"{CALL}\n{CALL}", WEATHER, 500, **fields):
        assert answered.calls == [("weather", '{"city": "Oslo"}')] and not answered.content


@pytest.mark.parametrize("api", APIS)
def test_a_call_without_marks(scripted: Scripted, api: Any) -> None:
    for answered in api(scripted, BARE, WEATHER, 500):
        assert (answered.content, answered.calls) == ("", [("weather", '{"city": "Oslo"}')])
    for answered in api(scripted, BARE + "!", WEATHER, 500):
        assert (answered.content, answered.calls) == (BARE + "!", [])


def test_a_form_has_no_calls_without_marks(scripted: Scripted) -> None:
    text = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    for answered in chat(scripted, text, WEATHER, 500, response_format={"type": "json_object"}):
        assert (answered.content, answered.calls) == (text, [])


def test_strict_tool_calls() -> None:
    engine, device = scripted_engine("qwen3")
    with serving(engine, strict_tool_calls=True) as server:
        for answered in chat(Scripted(server, device), BARE, WEATHER, 500):
            assert (answered.content, answered.calls) == (BARE, [])
        for answered in chat(Scripted(server, device), CALL, WEATHER, 500):
            assert answered.calls == [("weather", '{"city": "Oslo"}')]
