"""Whole sessions of coding agents over HTTP, with bodies as these programs send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import pytest
from anthropic.types import Message as ClaudeMessage
from anthropic.types import RawMessageStreamEvent
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxinfer.server.responses.tools import chat_tools
from jaxinfer.server.service.endpoint import WARNING
from kit.agent_bodies import (
    CHATS,
    CLAUDE_HEADERS,
    CLAUDE_SEARCH,
    CODEX_SEARCH,
    PATCH,
    THINKING,
    ClaudeCode,
    Codex,
)
from kit.answer_texts import WRITERS, Message
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
RESPONSE_EVENTS = TypeAdapter(ResponseStreamEvent)
CLAUDE_EVENTS = TypeAdapter(RawMessageStreamEvent)


class Scripted(NamedTuple):
    """A server whose answers a test gives."""

    server: Serving
    device: ScriptedDevice

    def speak(self, message: Message) -> None:
        """Answer with this message from now on."""
        self.device.speak(WRITERS["hermes"](message))

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """The response, whose status is checked."""
        with self.server.client(headers=headers) as client:
            response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine) as server:
        yield Scripted(server, device)
        server.wait_until_idle()


@pytest.fixture(scope="module")
def ignoring() -> Iterator[Scripted]:
    """A server that leaves hosted tools out."""
    engine, device = scripted_engine("qwen3")
    with serving(engine, ignore_hosted_tools=True) as server:
        yield Scripted(server, device)


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, whose names are their types."""
    frames = [frame.split("\n") for frame in response.text.removesuffix("\n\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name.removeprefix("event: ") for name, _ in frames] == [one["type"] for one in found]
    return found


# Codex


def answered(scripted: Scripted, session: Codex, message: Message, **fields: Any) -> list[Any]:
    """The items of the next answer, from a stream whose events and types are checked."""
    scripted.speak(message)
    response = scripted.post(RESPONSES, session.body(model="scripted", **fields))
    found = events(response)
    for event in found:
        RESPONSE_EVENTS.validate_python(event)
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    begun = [one["item"] for one in found if one["type"] == "response.output_item.added"]
    assert done == found[-1]["response"]["output"]
    assert [(one["id"], one["type"]) for one in begun] == [(one["id"], one["type"]) for one in done]
    texts: dict[str, str] = {}
    for one in found:
        if one["type"].endswith(".delta"):
            texts[one["item_id"]] = texts.get(one["item_id"], "") + one["delta"]
    for item in done:
        match item["type"]:
            case "custom_tool_call":
                assert texts[item["id"]] == item["input"]
            case "function_call":
                assert texts[item["id"]] == item["arguments"]
            case _:
                pass
    return done


def test_a_session_of_codex(scripted: Scripted) -> None:
    """Shell, patch and MCP calls, each sent back with its output."""
    session = Codex("scripted")
    shell = Message("I look.", (("exec_command", {"cmd": "cat greet.py"}),), "What is there?")
    items = answered(scripted, session, shell)
    assert [one["type"] for one in items] == ["reasoning", "message", "function_call"]
    assert "namespace" not in items[2] and items[2]["name"] == "exec_command"
    session.take(items, {"exec_command": "def greet():\n    print('hello')\n"})
    items = answered(scripted, session, Message(calls=(("apply_patch", {"input": PATCH}),)))
    assert [(one["type"], one["name"], one["input"]) for one in items] == [
        ("custom_tool_call", "apply_patch", PATCH)
    ]
    session.take(items, {"apply_patch": [{"type": "input_text", "text": "Exit code: 0"}]})
    calls = (("mcp__docs__read", {"page": "a"}), ("view_image", {"path": "a.png"}))
    items = answered(scripted, session, Message(calls=calls))
    assert [(one.get("namespace"), one["name"]) for one in items] == [
        ("mcp__docs", "read"),
        ("functions", "view_image"),
    ]
    session.take(items, {"read": "Page a", "view_image": "Images are not shown."})
    session.ask("Thanks. What did you do?")
    (item,) = answered(scripted, session, Message("A kinder greeting."))
    assert item["content"][0]["text"] == "A kinder greeting."


def test_the_history_is_the_prompt_of_the_models_own_calls(scripted: Scripted) -> None:
    """A call that is sent back is rendered as the call of the function that the model knows."""
    session = Codex("scripted")
    calls = (("apply_patch", {"input": PATCH}), ("mcp__docs__read", {"page": "a"}))
    session.take(answered(scripted, session, Message(calls=calls)), {"apply_patch": "", "read": ""})
    scripted.speak(Message("ok"))
    whole = scripted.post(RESPONSES, session.body(stream=False)).json()
    functions = [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for name, given in calls
    ]
    chat = [
        {"role": "system", "content": "\n\n".join((session.body()["instructions"], _text(0)))},
        {"role": "user", "content": _text(1)},
        {"role": "user", "content": _text(2)},
        {"role": "assistant", "tool_calls": functions},
        *({"role": "tool", "tool_call_id": "1", "content": ""} for _ in calls),
    ]
    tools = scripted.server.post("/tokenize", messages=chat, tools=chat_tools(session.tools))
    assert whole["usage"]["input_tokens"] == tools.json()["count"]


def _text(number: int) -> str:
    return "\n".join(part["text"] for part in Codex("").input[number]["content"])


def test_stored_sessions_go_on(scripted: Scripted) -> None:
    """With previous_response_id, where only new items are sent."""
    session = Codex("scripted")
    scripted.speak(Message(calls=(("apply_patch", {"input": PATCH}),)))
    first = scripted.post(RESPONSES, session.body(store=True, stream=False)).json()
    Response.model_validate(first)
    output = {
        "type": "custom_tool_call_output",
        "call_id": first["output"][0]["call_id"],
        "output": "Exit code: 0",
    }
    scripted.speak(Message("Done."))
    fields = {"store": True, "stream": False, "previous_response_id": first["id"]}
    second = scripted.post(RESPONSES, {**session.body(**fields), "input": [output]}).json()
    assert second["output"][0]["content"][0]["text"] == "Done."
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.parametrize("choice", ["function", "custom", "namespaced", "allowed"])
def test_codex_tools_can_be_required(scripted: Scripted, choice: str) -> None:
    """The script has no call: the grammar writes it."""
    choices = {
        "function": {"type": "function", "name": "view_image"},
        "custom": {"type": "custom", "name": "apply_patch"},
        "namespaced": {"type": "function", "name": "read", "namespace": "mcp__docs"},
        "allowed": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "apply_patch"}],
        },
    }
    call = {"custom": PATCH, "allowed": PATCH}.get(choice)
    names = {"function": "view_image", "namespaced": "mcp__docs__read"}
    arguments = {"page": "a"} if choice == "namespaced" else {"path": "a"}
    given = {"input": call} if call else arguments
    scripted.speak(Message(calls=((names.get(choice, "apply_patch"), given),)))
    body = Codex("scripted").body(tool_choice=choices[choice], stream=False)
    (item,) = scripted.post(RESPONSES, {**body, "parallel_tool_calls": False}).json()["output"]
    assert item["type"] == ("custom_tool_call" if call else "function_call")
    assert (item.get("input") or json.loads(item["arguments"])) == (call or arguments)


def test_hosted_tools_of_codex(scripted: Scripted) -> None:
    session = Codex("scripted")
    session.tools.append(CODEX_SEARCH)
    answer = scripted.server.post(RESPONSES, **session.body())
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[6].type")
    assert "--ignore-hosted-tools" in error["message"] and WARNING not in answer.headers
    call = {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}
    error = scripted.server.post(RESPONSES, input=[call, {"role": "user", "content": "a"}]).json()
    assert error["error"]["param"] == "input[0].type"
    assert "--ignore-hosted-tools" in error["error"]["message"]


def test_ignored_hosted_tools_of_codex(ignoring: Scripted) -> None:
    """They are not in the prompt, and a header says so; the response has them as they were sent."""
    plain, session = Codex("scripted"), Codex("scripted")
    session.tools.append(CODEX_SEARCH)
    session.input.insert(1, {"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}})
    ignoring.speak(Message("ok"))
    without = ignoring.post(RESPONSES, plain.body(stream=False))
    assert WARNING not in without.headers
    for stream in (False, True):
        answer = ignoring.post(RESPONSES, session.body(stream=stream))
        warning = answer.headers[WARNING]
        assert warning == "left out: tools[6] (web_search), input[1] (web_search_call)"
    whole = ignoring.post(RESPONSES, session.body(stream=False)).json()
    assert whole["tools"][6] == CODEX_SEARCH
    assert whole["usage"]["input_tokens"] == without.json()["usage"]["input_tokens"]


def test_a_grammar_that_cannot_be_enforced_is_said(scripted: Scripted) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    tools = [{"type": "custom", "name": "nest", "format": grammar}]
    scripted.speak(Message(calls=(("nest", {"input": "(("}),)))
    answer = scripted.post(RESPONSES, {"input": "a", "tools": tools})
    assert answer.headers[WARNING] == (
        "not enforced: the format of the tool 'nest': its rule 'start' contains itself"
    )
    assert answer.json()["output"][0]["input"] == "(("


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0].type",
        ),
        (
            {
                "tools": [
                    {"type": "function", "name": "a__b"},
                    {"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]},
                ]
            },
            "tools[1].tools[0].name",
        ),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]},
            "tools[0].format",
        ),
        (
            {"input": [{"type": "custom_tool_call", "call_id": "1", "name": "a"}]},
            "input[0].input",
        ),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "1"}]}, "input[0].output"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
    ],
    ids=str,
)
def test_wrong_fields_are_named(scripted: Scripted, fields: Any, param: str) -> None:
    answer = scripted.server.post(RESPONSES, **{"input": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert param in error["message"]
    if "image" in str(fields):
        assert "read text alone" in error["message"]


# Claude Code


def replied(scripted: Scripted, session: ClaudeCode, message: Message) -> list[Any]:
    """The blocks of the next answer, as a client assembles them from the checked stream."""
    scripted.speak(message)
    response = scripted.post(f"{MESSAGES}?beta=true", session.body(), **CLAUDE_HEADERS)
    found = events(response)
    for event in found:
        if event["type"] != "ping":
            CLAUDE_EVENTS.validate_python(event)
    kinds = [one["type"].removeprefix("content_") for one in found if one["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    inner = [kind for before, kind in pairwise([None, *kinds[1:-2]]) if kind != before]
    assert inner == ["block_start", "block_delta", "block_stop"] * (len(inner) // 3)
    usage = found[-2]["usage"]
    assert {"input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"} <= {*usage}
    blocks: list[Any] = []
    for one in found:
        if one["type"] == "content_block_start":
            blocks.append(one["content_block"])
        elif one["type"] == "content_block_delta":
            _extend(blocks[one["index"]], one["delta"])
    for block in blocks:
        if isinstance(block.get("input"), str):
            block["input"] = json.loads(block["input"])
    return blocks


def _extend(block: Any, delta: Any) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case _:
            block["input"] = (block["input"] or "") + delta["partial_json"]


@pytest.mark.parametrize("thinking", THINKING)
def test_a_session_of_claude_code(scripted: Scripted, thinking: str) -> None:
    """Calls with thoughts, a failed result, a found tool, and instructions in between."""
    session = ClaudeCode("scripted", THINKING[thinking])
    thoughts = "" if thinking == "disabled" else "What is there?"
    bash, edit = ("Bash", {"command": "ls"}), ("ToolSearch", {"query": "docs"})
    blocks = replied(scripted, session, Message("I look.", (bash, edit), thoughts))
    kinds = ["thinking"] * bool(thoughts) + ["text", "tool_use", "tool_use"]
    assert [one["type"] for one in blocks] == kinds
    found = [{"type": "tool_reference", "tool_name": "mcp__docs__read"}]
    failed = [{"type": "text", "text": "ls: no such file", "cache_control": {"type": "ephemeral"}}]
    session.take(
        blocks, {"Bash": {"content": failed, "is_error": True}, "ToolSearch": {"content": found}}
    )
    blocks = replied(scripted, session, Message(calls=(("mcp__docs__read", {"page": "a"}),)))
    session.take(blocks, {"mcp__docs__read": {"content": "Page a"}})
    session.note("The user has left the mode for plans.")
    (block,) = replied(scripted, session, Message("Done."))
    assert block == {"type": "text", "text": "Done."}
    counted = {"model", "messages", "system", "tools", "thinking"}
    body = {key: value for key, value in session.body().items() if key in counted}
    tokens = scripted.post(f"{COUNT}?beta=true", body, **CLAUDE_HEADERS).json()["input_tokens"]
    whole = scripted.post(MESSAGES, session.body(stream=False, stop_sequences=["!"])).json()
    ClaudeMessage.model_validate(whole)
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] > 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] >= tokens


@pytest.mark.parametrize("kind", ["auto", "any", "tool"])
def test_one_call_at_a_time(scripted: Scripted, kind: str) -> None:
    session = ClaudeCode("scripted", {"type": "disabled"})
    choice = {"type": kind, "disable_parallel_tool_use": True}
    if kind == "tool":
        choice["name"] = "Bash"
    calls = (("Bash", {"command": "a"}), ("Bash", {"command": "b"}))
    scripted.speak(Message(calls=calls))
    whole = scripted.post(MESSAGES, session.body(stream=False, tool_choice=choice)).json()
    assert [one["input"] for one in whole["content"]] == [{"command": "a"}]


def test_hosted_tools_of_claude_code(scripted: Scripted) -> None:
    session = ClaudeCode("scripted")
    session.tools.append(CLAUDE_SEARCH)
    for path in (MESSAGES, COUNT):
        answer = scripted.server.post(path, **session.body())
        error = answer.json()["error"]
        assert (answer.status_code, error["details"]["param"]) == (400, "tools[4].type")
        assert "--ignore-hosted-tools" in error["message"]


def test_kinds_of_tools_are_words(ignoring: Scripted) -> None:
    """They are in a header."""
    for kind in ("a\r\nb", "a: b", "ä", "", "a\n"):
        session = ClaudeCode("scripted", tools=[{"type": kind, "name": "a"}])
        answer = ignoring.server.post(COUNT, **session.body())
        error = answer.json()["error"]
        assert (answer.status_code, error["details"]["param"]) == (400, "tools[0].type"), kind


def test_ignored_hosted_tools_of_claude_code(ignoring: Scripted) -> None:
    session = ClaudeCode("scripted")
    tokens = ignoring.post(COUNT, session.body()).json()
    session.tools.append(CLAUDE_SEARCH)
    answer = ignoring.post(COUNT, session.body())
    assert answer.json() == tokens
    assert answer.headers[WARNING] == "left out: tools[4] (web_search_20250305)"
    ignoring.speak(Message("ok"))
    search = ignoring.post(MESSAGES, session.body(tools=[CLAUDE_SEARCH], stream=True))
    assert search.headers[WARNING] == "left out: tools[0] (web_search_20250305)"


def test_images_of_claude_code(scripted: Scripted) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    for content, path in (
        ([image], "messages[0].content[0].type"),
        (
            [{"type": "tool_result", "tool_use_id": "a", "content": [image]}],
            "messages[0].content[0].content[0].type",
        ),
    ):
        body = ClaudeCode("scripted").body(messages=[{"role": "user", "content": content}])
        answer = scripted.server.post(MESSAGES, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["details"]["param"]) == (400, path)
        assert "read text alone" in error["message"]


# agents over chats


@pytest.mark.parametrize("name", CHATS)
def test_agents_over_chats(scripted: Scripted, name: str) -> None:
    """The body is taken, and so is a next one with the answer and the results of its calls."""
    calls = (("read", {"filePath": "b.py"}),) if "tools" in CHATS[name] else ()
    scripted.speak(Message("I read.", calls))
    body = {"model": "scripted", **CHATS[name]}
    scripted.post(CHAT, body)
    whole = scripted.post(CHAT, _unstreamed(body)).json()
    ChatCompletion.model_validate(whole)
    answer = whole["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": "b = 2"}
        for one in answer.get("tool_calls", ())
    ]
    assert len(results) == len(calls)
    response = scripted.post(CHAT, {**body, "messages": [*body["messages"], answer, *results]})
    if body["stream"]:
        *frames, end, _ = response.text.split("\n\n")
        assert end == "data: [DONE]"
        for frame in frames:
            ChatCompletionChunk.model_validate_json(frame.removeprefix("data: "))


def _unstreamed(body: Any) -> Any:
    return {**{k: v for k, v in body.items() if k != "stream_options"}, "stream": False}


def test_custom_tools_in_chats(scripted: Scripted) -> None:
    """In answers, streams, choices and histories."""
    grammar = {
        "type": "grammar",
        "grammar": {"syntax": "regex", "definition": '[a-z]+\\n(?:"x"\\n)*'},
    }
    custom = {"type": "custom", "custom": {"name": "write", "format": grammar}}
    tools: list[Any] = [custom, *CHATS["Cline"]["tools"]]
    text = 'abc\n"x"\n'
    scripted.speak(Message(calls=(("write", {"input": text}), ("read", {"filePath": "a"}))))
    chat: list[Any] = [{"role": "user", "content": "Write."}]
    url = f"{scripted.server.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        create = client.chat.completions.create
        message = create(model="scripted", messages=chat, tools=tools).choices[0].message
        write, read = message.tool_calls or ()
        assert write.type == "custom" and write.custom.to_dict() == {"name": "write", "input": text}
        assert read.type == "function"
        deltas = [
            one.to_dict()
            for chunk in create(model="scripted", messages=chat, tools=tools, stream=True)
            if chunk.choices
            for one in chunk.choices[0].delta.tool_calls or ()
        ]
        assert deltas[0]["custom"] == {"name": "write", "input": ""}
        assert deltas[0]["type"] == "custom" and deltas[0]["id"]
        assert "".join(one["custom"]["input"] for one in deltas if one["index"] == 0) == text
        chat += [message.to_dict()]
        chat += [{"role": "tool", "tool_call_id": one.id, "content": "ok"} for one in (write, read)]
        choice: Any = {"type": "custom", "custom": {"name": "write"}}
        forced = create(model="scripted", messages=chat, tools=tools, tool_choice=choice)
        (call,) = forced.choices[0].message.tool_calls or ()
        assert call.type == "custom" and call.custom.input == text
