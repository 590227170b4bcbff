"""Tools and thoughts over HTTP, with the official ``openai`` client and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import pytest
from openai import OpenAI

from kit.answer_matrix import read, read_stream
from kit.answer_texts import MESSAGES, WRITERS
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving
from kit.watched_executor import watched_engine

CHATS = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **fields}}


TOOLS = [
    tool(),
    tool("clock", parameters={"type": "object", "properties": {}}),
    tool("save", parameters={"type": "object"}),
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]


class Scripted(NamedTuple):
    """A server whose answers a test gives."""

    server: Serving
    device: ScriptedDevice
    client: OpenAI

    def answer(self, text: str, **fields: Any) -> Any:
        """The first choice of a chat that the model answers with this text."""
        self.device.speak(text)
        fields = {"messages": QUESTION, "tools": TOOLS, **fields}
        return self.client.chat.completions.create(model="scripted", **fields).choices[0]

    def streaming(self, text: str, **fields: Any) -> Iterator[Any]:
        """The choices of all chunks of the same, as they come."""
        self.device.speak(text)
        fields = {"messages": QUESTION, "tools": TOOLS, **fields}
        chunks = self.client.chat.completions.create(model="scripted", stream=True, **fields)
        return (chunk.choices[0] for chunk in chunks if chunk.choices)

    def streamed(self, text: str, **fields: Any) -> list[Any]:
        """All of them."""
        return list(self.streaming(text, **fields))


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield Scripted(server, device, client)
        server.wait_until_idle()


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]


@pytest.mark.parametrize("name", MESSAGES)
def test_whole_and_streamed_answers(scripted: Scripted, name: str) -> None:
    """The client's own accumulation of a stream is the message of the whole answer."""
    message = MESSAGES[name]
    text = WRITERS["hermes"](message)
    whole = scripted.answer(text)
    assert whole.message.content == (message.content or (None if message.calls else ""))
    assert getattr(whole.message, "reasoning", "") == message.reasoning
    assert getattr(whole.message, "reasoning_content", "") == message.reasoning
    assert calls_of(whole.message) == list(message.calls)
    assert whole.finish_reason == ("tool_calls" if message.calls else "stop")
    scripted.device.speak(text)
    with scripted.client.chat.completions.stream(
        model="scripted", messages=QUESTION, tools=TOOLS
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert calls_of(final.message) == list(message.calls)
    assert (final.message.content or "") == message.content
    assert final.finish_reason == whole.finish_reason


def test_a_streamed_call_is_as_openai_sends_it(scripted: Scripted) -> None:
    text, choices = WRITERS["hermes"](MESSAGES["two calls"]), []
    with scripted.device.held(after=text.index("arguments") + 16) as released:
        for choice in scripted.streaming(text):
            choices.append(choice)
            if choice.delta.tool_calls and choice.delta.tool_calls[0].function.arguments:
                released.set()  # the client has a piece before the rest is drawn
    sent = [choice.delta.tool_calls[0] for choice in choices if choice.delta.tool_calls]
    heads = [one for one in sent if one.function.name]
    assert [(one.index, one.function.name, one.function.arguments) for one in heads] == [
        (0, "weather", ""),
        (1, "clock", ""),
    ]
    assert [(one.type, len(one.id or "")) for one in heads] == [("function", 9)] * 2
    assert heads[0].id != heads[1].id
    more = [one for one in sent if not one.function.name]
    assert {(one.type, one.id) for one in more} == {(None, None)}
    pieces = [[one.function.arguments for one in more if one.index == number] for number in (0, 1)]
    assert ["".join(one) for one in pieces] == ['{"city": "Zürich"}', "{}"]
    assert len(pieces[0]) > 1  # as they are generated
    assert [choice.finish_reason for choice in choices][-1] == "tool_calls"


def test_thoughts_are_streamed_as_they_come(scripted: Scripted) -> None:
    wanted = MESSAGES["thoughts"].reasoning
    with scripted.device.held(after=len("<think>") + len(wanted) // 2) as released:
        thoughts = []
        for choice in scripted.streaming(WRITERS["hermes"](MESSAGES["thoughts"])):
            if thought := getattr(choice.delta, "reasoning", None):
                thoughts.append(thought)
                released.set()  # the client has read a part before the rest was drawn
    assert "".join(thoughts) == wanted and len(thoughts) > 1
    hidden = scripted.streamed(
        WRITERS["hermes"](MESSAGES["thoughts"]), extra_body={"include_reasoning": False}
    )
    assert not [c for c in hidden if getattr(c.delta, "reasoning", None)]
    assert "".join(c.delta.content or "" for c in hidden) == "Hello!"


def test_without_tools_a_call_is_text(scripted: Scripted) -> None:
    text = WRITERS["hermes"](MESSAGES["call"])
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        choice = scripted.answer(text, **fields)
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"


def test_only_one_call_if_calls_are_not_parallel(scripted: Scripted) -> None:
    text = WRITERS["hermes"](MESSAGES["two calls"])
    choice = scripted.answer(text, parallel_tool_calls=False)
    assert calls_of(choice.message) == [("weather", {"city": "Zürich"})]


def test_a_call_that_is_cut_off(scripted: Scripted) -> None:
    """The call has the arguments so far, whole and streamed."""
    text = WRITERS["hermes"](MESSAGES["text and call"])
    for max_tokens in (60, 70):
        choice = scripted.answer(text, max_tokens=max_tokens)
        assert choice.finish_reason == "length"
        assert choice.message.content == MESSAGES["text and call"].content
        (call,) = choice.message.tool_calls
        begun = '{"city": "Oslo"}'[: max_tokens - 59]
        assert (call.function.name, call.function.arguments) == ("weather", begun)
        choices = scripted.streamed(text, max_tokens=max_tokens)
        sent = [one for choice in choices for one in choice.delta.tool_calls or ()]
        assert "".join(one.function.arguments for one in sent) == begun
        assert choices[-1].finish_reason == "length"


def test_calls_and_results_are_sent_back(scripted: Scripted) -> None:
    """The next prompt has the call and its result, with the same ids."""
    first = scripted.answer(WRITERS["hermes"](MESSAGES["call"])).message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "12 degrees"}
    messages = [*QUESTION, first.model_dump(), result]
    assert scripted.answer("It is cold.", messages=messages).message.content == "It is cold."
    tokens = scripted.server.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    prompt = bytes(token for token in tokens if token < 256).decode()
    assert '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}' in prompt
    assert "<tool_response>\n12 degrees" in prompt and '"description"' not in prompt
    messages[1]["tool_calls"][0]["function"]["arguments"] = '["no object"]'
    answer = scripted.server.post(CHATS, messages=messages)
    assert answer.status_code == 400
    assert "messages[1].tool_calls[0].function.arguments" in answer.json()["error"]["message"]


# the model would answer with text, were it not for the masks
@pytest.mark.parametrize("thinks", [False, True])
def test_required_calls_are_enforced(scripted: Scripted, thinks: bool) -> None:
    pytest.importorskip("llguidance")
    text = "<think>\nwell\n</think>\n\nNo." if thinks else "<to No."
    for choice, names in (
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
    ):
        # a named function is called once in any case
        parallel = {"parallel_tool_calls": False} if choice == "required" else {}
        found = scripted.answer(text, tool_choice=choice, max_tokens=400, **parallel)
        ((name, arguments),) = calls_of(found.message)
        assert name in names and (name == "clock" or isinstance(arguments["city"], str))
        assert found.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert getattr(found.message, "reasoning", "") == ("well" if thinks else "")


def test_some_of_the_tools_are_allowed(scripted: Scripted) -> None:
    pytest.importorskip("llguidance")
    allowed = [{"type": "function", "function": {"name": "clock"}}]
    for mode, reason in (("auto", "stop"), ("required", "tool_calls")):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        fields = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 400}
        found = scripted.answer("<to No.", **fields)
        assert found.finish_reason == reason
        assert [name for name, _ in calls_of(found.message)] == ["clock"] * (mode == "required")


def test_strict_arguments_follow_their_schema(scripted: Scripted) -> None:
    """The model may answer with text; a call that it begins has valid arguments."""
    pytest.importorskip("llguidance")
    strict = [tool(strict=True), tool("clock", parameters={})]
    wrong = 'Wait.<tool_call>\n{"name": "weather", "arguments": {"town": 3}}\n</tool_call>'
    assert scripted.answer(wrong).message.tool_calls[0].function.arguments == '{"town": 3}'
    found = scripted.answer(wrong, tools=strict, max_tokens=400)
    ((name, arguments),) = calls_of(found.message)
    assert (name, found.message.content) == ("weather", "Wait.")
    assert isinstance(arguments["city"], str)
    for plain in ("It rains.", "<tool", "a < b"):
        assert scripted.answer(plain, tools=strict).message.content == plain
    free = wrong.replace("weather", "clock")
    assert calls_of(scripted.answer(free, tools=strict).message) == [("clock", {"town": 3})]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_without_its_name_is_no_empty_text(scripted: Scripted, choice: str) -> None:
    call = '<tool_call>\n{"name": "weather"'
    for length in range(1, len(call)):
        found = scripted.answer(call, tool_choice=choice, max_tokens=length)
        assert found.finish_reason == "length" and not found.message.tool_calls
        assert found.message.content != "", call[:length]
    for length in range(1, len("<think>ab")):  # nor are thoughts alone, also not shown
        body = {"include_reasoning": length % 2 > 0}
        found = scripted.answer("<think>ab", max_tokens=length, extra_body=body)
        assert found.message.content != ""


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_ends_the_thoughts(scripted: Scripted, budget: int) -> None:
    text = "<think>" + "a" * 20
    body = {"thinking_token_budget": budget}
    found = scripted.answer(text, tools=None, max_tokens=40, extra_body=body)
    assert getattr(found.message, "reasoning", "") == "a" * budget
    assert found.message.content is None or found.message.content.startswith("a" * 7)
    # enough of a budget, and answers without thoughts, change nothing
    for given in (WRITERS["hermes"](MESSAGES["thoughts"]), "Hello!"):
        found = scripted.answer(given, tools=None, extra_body={"thinking_token_budget": 100})
        assert found.message.content == "Hello!"


def test_thinking_is_switched_by_the_template(scripted: Scripted) -> None:
    closed = b"<think>\n\n</think>\n\n"
    for body, is_closed in (
        ({}, False),
        ({"reasoning_effort": "high"}, False),
        ({"reasoning_effort": "none"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ):
        tokens = scripted.server.post("/tokenize", messages=QUESTION, **body).json()["tokens"]
        assert bytes(token for token in tokens if token < 256).endswith(closed) == is_closed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [*TOOLS, tool("clock")]}, "tools[3].function.name"),
        ({"tools": [tool(parameters=[1])]}, "tools[0].function.parameters"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description"),
        ({"tools": "weather"}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"name": "weather"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]},
                },
            },
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (
            {
                "tools": [tool(parameters={"type": "object", "properties": {"a": {"type": "b"}}})],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties.a.type",
        ),
        ({"tools": [tool(parameters={"properties": {"a": {"not": {}}}}, strict=True)]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(scripted: Scripted, fields: Any, param: str) -> None:
    answer = scripted.server.post(CHATS, messages=QUESTION, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_tools_need_a_known_form() -> None:
    engine, _ = scripted_engine("smollm2")
    with serving(engine, tool_call_parser="none") as server:
        answer = server.post(CHATS, messages=QUESTION, tools=TOOLS)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "--tool-call-parser" in answer.json()["error"]["message"]
        answer = server.post(CHATS, messages=QUESTION, thinking_token_budget=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400,
            "thinking_token_budget",
        )


def test_a_forced_parser() -> None:
    engine, device = scripted_engine("smollm2")
    with serving(engine, tool_call_parser="mistral", reasoning_parser="deepseek_r1") as server:
        device.speak('<think>a</think>[TOOL_CALLS]weather[ARGS]{"city": "Rom"}')
        answer = server.post(CHATS, messages=QUESTION, tools=TOOLS, n=2).json()
        for choice in answer["choices"]:
            assert choice["message"]["reasoning"] == "a"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "weather", "arguments": '{"city": "Rom"}'}
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]}
        assert len(ids) == 2


USER = [{"role": "user", "content": "hi"}]
COUNTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ({"messages": USER, "max_tokens": 1}, ("usage", "prompt_tokens")),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 1}, ("usage", "input_tokens")),
    "/v1/messages": ({"messages": USER, "max_tokens": 1}, ("usage", "input_tokens")),
    "/v1/messages/count_tokens": ({"messages": USER}, ("input_tokens",)),
    "/tokenize": ({"messages": USER}, ("count",)),
}


@pytest.fixture(scope="module")
def telling() -> Iterator[Serving]:
    """A server whose prompts show by their length what a template knows of tools."""
    defined, given = "{{ 'd' * 5 if tools is defined }}", "{{ 'n' * 7 if tools is not none }}"
    with serving(watched_engine()[0], chat_template=f"hi{defined}{given}") as server:
        yield server


@pytest.mark.parametrize("path", COUNTS)
def test_empty_tools_are_no_tools(telling: Serving, path: str) -> None:
    fields, place = COUNTS[path]
    for tools in ({}, {"tools": []}, {"chat_template_kwargs": {"tools": []}}):
        answer = telling.post(path, model="watched", **fields, **tools)
        assert answer.status_code == 200, answer.text
        assert reduce(getitem, place, answer.json()) == len("hiddddd"), tools


@pytest.mark.parametrize("streams", [False, True])
def test_strict_holds_in_the_other_apis(scripted: Scripted, streams: bool) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    text = '<tool_call>\n{"name": "f", "arguments": {"n": "many"}}\n</tool_call>'
    scripted.device.speak(text)
    for strict in (True, False):
        function = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
        fields: Any = {"input": "How many?", "tools": [function], "stream": streams}
        body = scripted.server.post("/v1/responses", **fields).text
        seen = read_stream("responses", body) if streams else read("responses", json.loads(body))
        assert ("many" in seen.calls[0][1]) == (not strict)
        anthropic = {"name": "f", "input_schema": schema, "strict": strict}
        fields = {"messages": QUESTION, "max_tokens": 300, "tools": [anthropic]}
        body = scripted.server.post("/v1/messages", **fields, stream=streams).text
        seen = read_stream("messages", body) if streams else read("messages", json.loads(body))
        assert ("many" in seen.calls[0][1]) == (not strict)


def test_no_prompt_says_strict(scripted: Scripted) -> None:
    for shown in (tool(), tool(strict=True)):
        fields = {"messages": QUESTION, "tools": [shown], "return_token_strs": True}
        found = scripted.server.post("/tokenize", **fields).json()["token_strs"]
        assert "strict" not in "".join(found)


def test_a_named_function_is_called_once(scripted: Scripted) -> None:
    """The model would go on with further calls; in the three APIs, whole and streamed."""
    pytest.importorskip("llguidance")
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    text = "\n".join([call] * 5)
    choice: Any = {"type": "function", "function": {"name": "clock"}}
    found = scripted.answer(text, tool_choice=choice, max_tokens=300)
    assert calls_of(found.message) == [("clock", {})] and found.finish_reason == "stop"
    chunks = scripted.streamed(text, tool_choice=choice, max_tokens=300)
    calls = [one for chunk in chunks for one in chunk.delta.tool_calls or () if one.id]
    assert len(calls) == 1 and chunks[-1].finish_reason == "stop"
    function = {"type": "function", "name": "clock", "parameters": {}}
    named = {"type": "function", "name": "clock"}
    fields = {"input": "What time?", "tools": [function], "tool_choice": named}
    output = scripted.server.post("/v1/responses", **fields).json()["output"]
    assert [item["type"] for item in output] == ["function_call"]
    anthropic = {"name": "clock", "input_schema": {"type": "object"}}
    fields = {"messages": QUESTION, "max_tokens": 300, "tools": [anthropic]}
    chosen = {"type": "tool", "name": "clock"}
    answer = scripted.server.post("/v1/messages", **fields, tool_choice=chosen).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"
