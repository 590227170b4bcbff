"""Histories and tools that give no prompt get a 400 that names the place, in every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.core.errors import RequestError
from kit.chat_histories import answer, call, calling, compiled, function, object_with, result, user
from kit.scripted import TEMPLATES, scripted_engine
from kit.server import Serving, serving

HICCUP = {"type": "hiccup"}
# a schema, and the path of its wrong type
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": (HICCUP, "type"),
    "property": (object_with(a=HICCUP), "properties.a.type"),
    "property of a property": (
        object_with(a=object_with(b=HICCUP)),
        "properties.a.properties.b.type",
    ),
    "items": (object_with(a={"type": "array", "items": HICCUP}), "properties.a.items.type"),
    "anyOf": (object_with(a={"anyOf": [{"type": "null"}, HICCUP]}), "properties.a.anyOf[1].type"),
    "$defs": ({**object_with(), "$defs": {"A": HICCUP}}, "$defs.A.type"),
    "additionalProperties": (
        {"type": "object", "additionalProperties": HICCUP},
        "additionalProperties.type",
    ),
    "one of a list": (object_with(a={"type": ["string", "hiccup"]}), "properties.a.type"),
    "a number": (object_with(a={"type": 3}), "properties.a.type"),
    "a class": (object_with(a={"type": "str"}), "properties.a.type"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    engine, device = scripted_engine("qwen2.5")
    device.speak("ok")
    with serving(engine) as started:
        yield started


def refused(server: Serving, path: str, fields: dict[str, Any], param: str) -> str:
    response = server.post(path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    found = error["details"]["param"] if path.startswith("/v1/messages") else error["param"]
    assert found == param
    assert error["message"].startswith(param)
    return error["message"]


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


def calling_without(*path: str) -> dict[str, Any]:
    """A message whose call lacks this."""
    made = call()
    if path == ("function",):
        return calling(without(made, "function"))
    return calling({**made, "function": without(made["function"], path[-1])})


CHATS = {
    "call without function": (calling_without("function"), "messages[1].tool_calls[0].function"),
    "function null": (
        calling({**call(), "function": None}),
        "messages[1].tool_calls[0].function",
    ),
    "custom call": (
        calling({"id": "a", "type": "custom", "custom": {"input": ""}}),
        "messages[1].tool_calls[0].custom.name",
    ),
    "call without name": (
        calling_without("function", "name"),
        "messages[1].tool_calls[0].function.name",
    ),
    "empty name": (calling(call("")), "messages[1].tool_calls[0].function.name"),
    "name of another type": (calling(call(3)), "messages[1].tool_calls[0].function.name"),
    "id of another type": (calling(call(call_id=3)), "messages[1].tool_calls[0].id"),
    "older call": (
        {**answer(None), "function_call": {"name": "f", "arguments": "{}"}},
        "messages[1].function_call",
    ),
    "result without id": (without(result(), "tool_call_id"), "messages[1].tool_call_id"),
    "result with a null id": (result(call_id=None), "messages[1].tool_call_id"),
    "result without call": (result(), "messages[1].tool_call_id"),
    "empty role": ({"role": "", "content": "a"}, "messages[1].role"),
    "unknown role": ({"role": "critic", "content": "a"}, "messages[1].role"),
    "older result": ({"role": "function", "name": "f", "content": "a"}, "messages[1].role"),
    "role of another type": ({"role": 3, "content": "a"}, "messages[1].role"),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats(server: Serving, name: str) -> None:
    message, param = CHATS[name]
    chat = [user(), message]
    said = refused(server, "/v1/chat/completions", {"messages": chat}, param)
    refused(server, "/tokenize", {"messages": chat}, param)
    with pytest.raises(RequestError) as raised:
        compiled(TEMPLATES / "qwen2.5.jinja").render(chat)
    assert str(raised.value) == said


def test_results_belong_to_calls(server: Serving) -> None:
    for number, wrong in ((2, result(call_id="other")), (2, without(result(), "tool_call_id"))):
        chat = [user(), calling(), wrong, result()]
        refused(
            server, "/v1/chat/completions", {"messages": chat}, f"messages[{number}].tool_call_id"
        )
    nameless = [user(), calling(without(call(), "id")), without(result(), "tool_call_id")]
    twice = [user(), calling(), result(), result("MORE"), answer(), result("LATER")]
    for chat in (nameless, twice):
        assert server.post("/v1/chat/completions", messages=chat, max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", SCHEMAS)
def test_types_of_parameters(server: Serving, name: str) -> None:
    schema, path = SCHEMAS[name]
    tools = [function(parameters=object_with()), function("g", parameters=schema)]
    chat = {"messages": [user()]}
    param = f"tools[1].function.parameters.{path}"
    said = refused(server, "/v1/chat/completions", {**chat, "tools": tools}, param)
    assert "use array, boolean, integer, null, number, object or string" in said
    with pytest.raises(RequestError, match=r"tools\[1\].function.parameters"):
        compiled(TEMPLATES / "qwen2.5.jinja").render([user()], variables={"tools": tools})
    own = [{"type": "function", "name": "f", "parameters": schema}]
    param = f"tools[0].parameters.{path}"
    refused(server, "/v1/responses", {"input": "a", "tools": own}, param)
    own = [{"name": "f", "input_schema": schema}]
    param = f"tools[0].input_schema.{path}"
    refused(server, "/v1/messages", {**chat, "max_tokens": 1, "tools": own}, param)


def test_types_may_be_named_like_keywords(server: Serving) -> None:
    schema = object_with(type={"type": "string"}, properties={"enum": [{"type": "hiccup"}]})
    schema |= {"examples": [HICCUP], "default": HICCUP}
    fields = {"messages": [user()], "tools": [function(parameters=schema)], "max_tokens": 1}
    assert server.post("/v1/chat/completions", **fields).status_code == 200


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "12"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [user([RESULT])]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [user(), answer([USE]), user([{**RESULT, "tool_use_id": "b"}])]},
            "messages[2].content[0].tool_use_id",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": None}]}, "tools[0].input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": None}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_anthropics_api(server: Serving, fields: dict[str, Any], param: str) -> None:
    for path, more in (("/v1/messages", {"max_tokens": 1}), ("/v1/messages/count_tokens", {})):
        refused(server, path, {"messages": [user()], **more, **fields}, param)


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "12"}
FORMAT = {"type": "json_schema", "name": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [user(), OUTPUT]}, "input[1].call_id"),
        ({"input": [user(), CALL, {**OUTPUT, "call_id": "b"}]}, "input[2].call_id"),
        ({"input": [user(), OUTPUT, CALL]}, "input[1].call_id"),
        ({"text": {"format": FORMAT}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": None}}}, "text.format.schema"),
    ],
)
def test_the_responses_api(server: Serving, fields: dict[str, Any], param: str) -> None:
    refused(server, "/v1/responses", {"input": "a", **fields}, param)


def test_outputs_of_a_call_in_the_response_before(server: Serving) -> None:
    first = server.post("/v1/responses", input=[user(), CALL], max_output_tokens=1).json()
    fields = {"previous_response_id": first["id"], "max_output_tokens": 1}
    assert server.post("/v1/responses", input=[OUTPUT], **fields).status_code == 200
    wrong = {"input": [{**OUTPUT, "call_id": "b"}], **fields}
    refused(server, "/v1/responses", wrong, "input[0].call_id")


def test_a_thread_is_refused_so_that_the_client_sends_the_whole_chat(server: Serving) -> None:
    fields = {"messages": [user()], "max_tokens": 1, "thread": {"type": "create"}}
    error = server.post("/v1/messages", **fields).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "param": "thread"}
