"""Anthropic's Messages API over HTTP, with the official ``anthropic`` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import httpx
import pytest
from anthropic import Anthropic, beta_tool
from anthropic.types import Message
from pydantic import BaseModel

from kit.answer_texts import MESSAGES, WRITERS
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

PATH = "/v1/messages"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather of a city.", "input_schema": CITY},
    {"name": "clock", "input_schema": NOTHING},
    {"name": "save", "input_schema": {"type": "object"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]
BODY: Any = {"model": "scripted", "max_tokens": 500, "messages": QUESTION}
THOUGHTS = WRITERS["hermes"](MESSAGES["thoughts"])
CALLS = WRITERS["hermes"](MESSAGES["two calls"])


class Scripted(NamedTuple):
    """A server whose answers a test gives."""

    server: Serving
    device: ScriptedDevice
    client: Anthropic

    def answer(self, text: str, **fields: Any) -> Message:
        """The message of a model that answers with this text."""
        self.device.speak(text)
        return self.client.messages.create(**{**BODY, "tools": TOOLS, **fields})

    def streamed(self, text: str, **fields: Any) -> tuple[list[Any], Message]:
        """The events of the same, and the message that the client makes of them."""
        self.device.speak(text)
        with self.client.messages.stream(**{**BODY, "tools": TOOLS, **fields}) as stream:
            events = list(stream)
            return events, stream.get_final_message()

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """The bare response to these fields."""
        with self.server.client(headers={"x-api-key": "secret"}) as client:
            return client.post(path, json=fields)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine, api_key=("secret",)) as server:
        with Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
            yield Scripted(server, device, client)
        server.wait_until_idle()


def said(message: Message) -> list[tuple[str, Any]]:
    """The blocks of a message without ids and signatures."""
    found: list[tuple[str, Any]] = []
    for block in message.content:
        match block.type:
            case "text":
                found.append(("text", block.text))
            case "thinking":
                assert len(block.signature) == 64
                found.append(("thinking", block.thinking))
            case "tool_use":
                found.append((block.name, block.input))
    return found


def kinds(events: list[Any]) -> list[str]:
    """The types of events as the server sends them, equal neighbours once."""
    sent = [one.type for one in events if one.type.startswith(("message_", "content_"))]
    return [kind for number, kind in enumerate(sent) if sent[number - 1 : number] != [kind]]


@pytest.mark.parametrize("name", MESSAGES)
def test_whole_and_streamed_answers(scripted: Scripted, name: str) -> None:
    """The client's own accumulation of a stream is the message of the whole answer."""
    wanted = MESSAGES[name]
    text = WRITERS["hermes"](wanted)
    whole = scripted.answer(text)
    blocks = [("thinking", wanted.reasoning), ("text", wanted.content)]
    assert said(whole) == [block for block in blocks if block[1]] + list(wanted.calls)
    assert whole.stop_reason == ("tool_use" if wanted.calls else "end_turn")
    assert (whole.stop_sequence, whole.role, whole.model) == (None, "assistant", "scripted")
    events, final = scripted.streamed(text)
    assert said(final) == said(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds(events) == [
        "message_start",
        *(block * len(whole.content)),
        "message_delta",
        "message_stop",
    ]


def test_the_bytes_of_a_stream(scripted: Scripted) -> None:
    written, text = WRITERS["hermes"](MESSAGES["call"]), ""
    scripted.device.speak(written)
    body = {**BODY, "tools": TOOLS, "stream": True}
    with (
        scripted.device.held(after=written.index("arguments") + 16) as released,
        scripted.server.client(headers={"x-api-key": "secret"}) as client,
        client.stream("POST", PATH, json=body) as answer,
    ):
        for part in answer.iter_text():
            text += part
            if "partial_json" in text:
                released.set()  # the client has a piece before the rest is drawn
    frames = [frame.split("\n") for frame in text.split("\n\n")]
    assert frames.pop() == [""]  # no [DONE]
    names = [lines[0].removeprefix("event: ") for lines in frames]
    assert names[:2] == ["message_start", "ping"]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in frames]
    assert [one["type"] for one in data] == names
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert data[0]["message"]["id"] == f"msg_{answer.headers['request-id']}"
    assert data[0]["message"]["stop_reason"] is None
    start, *more, stop, end, last = data[2:]
    assert start["content_block"].keys() == {"type", "id", "name", "input"}
    assert {one["index"] for one in (start, *more, stop)} == {0}
    pieces = [one["delta"]["partial_json"] for one in more]
    assert json.loads("".join(pieces)) == dict(MESSAGES["call"].calls[0][1])
    assert len(pieces) > 1  # as they are generated
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"].keys() == data[0]["message"]["usage"].keys()
    assert last == {"type": "message_stop"}


def test_thoughts_are_streamed_as_they_come(scripted: Scripted) -> None:
    wanted = MESSAGES["thoughts"].reasoning
    scripted.device.speak(THOUGHTS)
    thoughts: list[str] = []
    with scripted.device.held(after=len("<think>") + len(wanted) // 2) as released:
        for event in scripted.client.messages.create(**BODY, stream=True):
            if event.type == "content_block_delta" and event.delta.type == "thinking_delta":
                thoughts.append(event.delta.thinking)
                released.set()  # the client has read a part before the rest was drawn
    assert "".join(thoughts) == wanted and len(thoughts) > 1


@pytest.mark.parametrize(
    ("text", "fields", "reason", "sequence", "blocks"),
    [
        ("Hello", {}, "end_turn", None, [("text", "Hello")]),
        ("Hello", {"max_tokens": 3}, "max_tokens", None, [("text", "Hel")]),
        ("Hello", {"stop_sequences": ["x", "ll"]}, "stop_sequence", "ll", [("text", "He")]),
        ("", {}, "end_turn", None, []),
        # a call that is cut off before it has begun, and in its first argument
        (CALLS, {"max_tokens": 20}, "max_tokens", None, [("text", CALLS[:20])]),
        (CALLS, {"max_tokens": 55}, "max_tokens", None, [("weather", {})]),
        (CALLS, {"tool_choice": {"type": "none"}}, "end_turn", None, [("text", CALLS)]),
        (
            CALLS,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_use",
            None,
            [("weather", {"city": "Zürich"})],
        ),
    ],
)
def test_ends(
    scripted: Scripted, text: str, fields: Any, reason: str, sequence: str | None, blocks: Any
) -> None:
    for answer in (scripted.answer(text, **fields), scripted.streamed(text, **fields)[1]):
        assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
        assert said(answer) == blocks


def test_the_context_may_end_an_answer(scripted: Scripted) -> None:
    """max_tokens may exceed the context: agents ask for more than small models have."""
    limit = scripted.server.engine.limits.max_model_len
    empty = scripted.client.messages.count_tokens(
        model="scripted", messages=[{"role": "user", "content": ""}]
    )
    question = [{"role": "user", "content": "a" * (limit - empty.input_tokens - 9)}]
    answer = scripted.answer("b" * 99, messages=question, tools=[], max_tokens=2 * limit)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens == 9
    with pytest.raises(anthropic.BadRequestError) as refused:
        scripted.answer("", messages=[{"role": "user", "content": "a" * limit}])
    assert refused.value.error_code == "context_length_exceeded"


# the model would answer with text, were it not for the masks
@pytest.mark.parametrize("thinks", [False, True])
def test_required_calls_are_enforced(scripted: Scripted, thinks: bool) -> None:
    pytest.importorskip("llguidance")
    text = "<think>\nwell\n</think>\n\nNo." if thinks else "<to No."
    for choice, names in (
        ({"type": "any"}, {"weather", "clock"}),
        ({"type": "tool", "name": "clock"}, {"clock"}),
    ):
        one = {**choice, "disable_parallel_tool_use": True}
        found = scripted.answer(text, tool_choice=one)
        *thoughts, (name, _) = said(found)
        assert name in names and found.stop_reason == "tool_use"
        assert thoughts == ([("thinking", "well")] if thinks else [])


def test_structured_output(scripted: Scripted) -> None:
    pytest.importorskip("llguidance")

    class City(BaseModel):
        name: str
        size: int

    scripted.device.speak('{"name": "Bern", "size": 7} and so on')
    parsed = scripted.client.messages.parse(**BODY, output_format=City)
    assert parsed.parsed_output == City(name="Bern", size=7)


def test_thinking(scripted: Scripted) -> None:
    budget = {"type": "enabled", "budget_tokens": 5}
    assert said(scripted.answer("<think>" + "a" * 9, thinking=budget))[0] == ("thinking", "aaaaa")
    omitted = {"type": "adaptive", "display": "omitted"}
    events, answer = scripted.streamed(THOUGHTS, thinking=omitted)
    assert said(answer) == [("thinking", ""), ("text", "Hello!")]
    assert not [one for one in events if one.type == "thinking"]
    assert answer.content[0] != scripted.answer("<think>b</think>", thinking=omitted).content[0]


def test_counted_tokens_are_those_of_the_prompt(scripted: Scripted) -> None:
    """Also of a conversation with calls, results and thoughts, and those from the cache; the prompt
    is that of OpenAI's form.
    """
    first = scripted.answer(WRITERS["hermes"](MESSAGES["thoughts and call"]))
    call = first.content[1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    fields: Any = {
        "model": "scripted",
        "messages": [*QUESTION, first.to_param(), {"role": "user", "content": [result]}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": TOOLS,
        "thinking": {"type": "disabled"},
    }
    counted = scripted.client.messages.count_tokens(**fields).input_tokens
    arguments = json.dumps(call.input)
    called = {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            *QUESTION,
            {
                "role": "assistant",
                "reasoning": MESSAGES["thoughts and call"].reasoning,
                "tool_calls": [called],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    **{name: tool[name] for name in ("name", "description") if name in tool},
                    "parameters": tool["input_schema"],
                },
            }
            for tool in TOOLS
        ],
        "reasoning_effort": "none",
    }
    assert scripted.post("/tokenize", **chat).json()["count"] == counted
    for read_again in (False, True):
        answer = scripted.answer("It is cold.", **fields)
        usage = answer.usage
        assert said(answer) == [("text", "It is cold.")]
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        assert usage.cache_creation_input_tokens == 0
        if read_again:
            assert usage.input_tokens <= scripted.server.engine.limits.page_size
    more = scripted.client.messages.count_tokens(**fields | {"system": "Be very brief."})
    assert more.input_tokens == counted + len("very ")
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content is required"):
        scripted.client.messages.count_tokens(**fields | {"messages": [{"role": "user"}]})


def test_a_client_that_runs_tools(scripted: Scripted) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        scripted.device.speak("It is cold.")
        return f"12 degrees in {city}"

    scripted.device.speak(WRITERS["hermes"](MESSAGES["text and call"]))
    call, answer = scripted.client.beta.messages.tool_runner(**BODY, tools=[weather])
    assert [block.type for block in call.content] == ["text", "tool_use"]
    assert [block.text for block in answer.content if block.type == "text"] == ["It is cold."]
    known = [slot.token_ids for slot in scripted.device.fake.slots.values()]
    texts = [bytes(token for token in token_ids if token < 256) for token_ids in known]
    (text,) = [text for text in texts if b"<tool_response>\n12 degrees in Oslo" in text]
    assert QUESTION[0]["content"].encode() in text  # the whole chat, though the client has threads


def test_the_requests_of_an_agent(scripted: Scripted) -> None:
    """The form of Claude Code's requests: blocks with cache_control, beta headers and fields."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch={};"
    scripted.device.speak("Done.")
    counts: list[int] = []
    for number in range(2):
        body: Any = {
            "model": "scripted",
            "max_tokens": 32000,
            "betas": ["claude-code-20250219", "not-known-2030-01-01"],
            "system": [
                {"type": "text", "text": billing.format(number)},
                {"type": "text", "text": "You are an agent." * 9, **mark},
            ],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Go.", **mark}]}],
            "tools": [{**TOOLS[0], **mark, "eager_input_streaming": True}],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "user_1"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        }
        with scripted.client.beta.messages.stream(**body) as stream:
            answer = stream.get_final_message()
        assert [block.type for block in answer.content] == ["text"]
        counts.append(answer.usage.input_tokens)
    assert counts[1] <= scripted.server.engine.limits.page_size  # the rest was in the cache


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {
                "messages": [
                    *QUESTION,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    },
                ]
            },
            "messages[1]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[3].name"),
        ({"tools": [{"name": "a b", "input_schema": NOTHING}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "a"}}}},
            "output_config.format.schema",
        ),
        ({"model": "claude"}, "model"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(scripted: Scripted, fields: Any, param: str) -> None:
    """In the message, and for programs in the details."""
    kind = anthropic.NotFoundError if param == "model" else anthropic.BadRequestError
    with pytest.raises(kind) as caught:
        scripted.client.messages.create(**{**BODY, "tools": TOOLS}, extra_body=fields)
    error, body = caught.value, caught.value.body
    assert isinstance(body, dict) and body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error" and body["request_id"] == error.request_id
    assert body["error"]["details"]["param"] == param
    assert param.split(".")[0].split("[")[0] in body["error"]["message"]
    expected = "not_found_error" if param == "model" else "invalid_request_error"
    assert error.type == expected


def test_keys_and_paths(scripted: Scripted) -> None:
    with pytest.raises(anthropic.AuthenticationError) as caught:
        scripted.client.with_options(api_key="wrong").messages.create(**BODY)
    assert caught.value.type == "authentication_error"
    with Anthropic(base_url=scripted.server.url, auth_token="secret", max_retries=0) as bearer:
        assert bearer.messages.count_tokens(model="scripted", messages=QUESTION).input_tokens
        with pytest.raises(anthropic.NotFoundError) as missing:
            bearer.messages.batches.list()
        assert missing.value.error_code == "not_found"  # OpenAI's form has no details


def test_a_failure_midway_is_an_event(scripted: Scripted) -> None:
    """As is the end of the server: the answer is not complete."""
    scripted.device.speak("a" * 400)
    with scripted.device.held(after=3) as released:
        stream = scripted.client.messages.create(**BODY, stream=True)
        assert next(iter(stream)).type == "message_start"
        scripted.server.loop.call_soon_threadsafe(scripted.server.service.stop_all)
        released.set()
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(stream)
    assert (caught.value.type, caught.value.error_code) == ("api_error", "aborted")


def test_thoughts_need_known_marks() -> None:
    engine, _ = scripted_engine("smollm2")
    with serving(engine, tool_call_parser="none") as server:
        answer = server.post(PATH, **BODY, thinking={"type": "enabled", "budget_tokens": 9})
        assert answer.status_code == 200  # Claude Code always sends a budget
        assert "thinking.budget_tokens" in answer.headers["x-jaxinfer-warning"]
        answer = server.post(PATH, **BODY, tools=TOOLS)
        assert answer.status_code == 400
        assert answer.json()["error"]["details"]["param"] == "tools"
