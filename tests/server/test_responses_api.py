"""``/v1/responses`` with the official ``openai`` client and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from kit.answer_texts import MESSAGES, WRITERS, Message
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

RESPONSES = "/v1/responses"
QUESTION = "What is the weather?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "of a city", "parameters": CITY},
    {"type": "function", "name": "clock"},
    {"type": "function", "name": "save"},
]
CHAT_TOOLS = [
    {"type": "function", "function": {name: one[name] for name in one if name != "type"}}
    for one in TOOLS
]
THOUGHTS = WRITERS["hermes"](MESSAGES["thoughts"])
CALL = WRITERS["hermes"](MESSAGES["call"])
LOGPROBS: Any = ["message.output_text.logprobs"]


class Scripted(NamedTuple):
    """A server whose answers a test gives."""

    server: Serving
    device: ScriptedDevice
    client: OpenAI

    def answer(self, text: str, /, **fields: Any) -> Any:
        """The response that the model answers with this text."""
        self.device.speak(text)
        return self.client.responses.create(model="scripted", **{"input": QUESTION, **fields})

    def num_tokens(self, messages: list[Any], **fields: Any) -> int:
        """Tokens of the prompt of a chat."""
        return self.server.post("/tokenize", messages=messages, **fields).json()["count"]

    def refusal(self, **fields: Any) -> Any:
        """The error for these fields."""
        response = self.server.post(RESPONSES, **{"input": QUESTION, **fields})
        assert response.status_code == 400, response.text
        return response.json()["error"]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    engine, device = scripted_engine("qwen3")
    with serving(engine) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            yield Scripted(server, device, client)
        server.wait_until_idle()
        assert not server.service.background


def message_of(response: Any) -> Message:
    """The thoughts, text and calls of a response's items."""
    texts = {"reasoning": "", "message": ""}
    calls = []
    for item in response.output:
        assert item.status == "completed"
        if item.type == "function_call":
            calls.append((item.name, json.loads(item.arguments)))
        else:
            texts[item.type] += "".join(part.text for part in item.content)
    return Message(texts["message"], tuple(calls), texts["reasoning"])


@pytest.mark.parametrize("name", MESSAGES)
def test_whole_and_streamed_answers(scripted: Scripted, name: str) -> None:
    """The client's own accumulation of a stream is the whole answer."""
    text = WRITERS["hermes"](MESSAGES[name])
    whole = scripted.answer(text, tools=TOOLS)
    assert (message_of(whole), whole.status) == (MESSAGES[name], "completed")
    with scripted.client.responses.stream(model="scripted", input=QUESTION, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert message_of(final) == MESSAGES[name]
    for usage in (final.usage, whole.usage):
        usage.input_tokens_details.cached_tokens = 0  # the second prompt is cached
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_order_of_events(scripted: Scripted) -> None:
    """As OpenAI sends them, each once but the deltas, with all fields of the client's types."""
    stream = scripted.answer(WRITERS["hermes"](MESSAGES["all"]), tools=TOOLS, stream=True)
    events = list(stream)
    for event in events:
        type(event).model_validate(event.to_dict())
    kinds = [event.type.removeprefix("response.") for event in events]
    part = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done"]
    part += ["content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    call = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    expected = [
        *("created", "in_progress"),
        *(name.format("reasoning_text") for name in part),
        *(name.format("output_text") for name in part),
        *call,
        *call,
        "completed",
    ]
    assert [kind for before, kind in pairwise([None, *kinds]) if kind != before] == expected
    indices = [getattr(event, "output_index", None) for event in events[2:-1]]
    assert indices == sorted(indices) and indices[-1] == 3
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    added = {e.item.id: e.output_index for e in events if e.type.endswith("output_item.added")}
    final = {item.id: index for index, item in enumerate(events[-1].response.output)}
    assert added == final and len(added) == 4


def test_the_frames_have_names_and_no_done(scripted: Scripted) -> None:
    scripted.device.speak("Hi")
    with scripted.server.client() as client:
        text = client.post(RESPONSES, json={"input": "x", "stream": True}).text
    frames = [frame.split("\n") for frame in text.removesuffix("\n\n").split("\n\n")]
    for name, data in frames:
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert frames[-1][0] == "event: response.completed"


def test_thoughts_as_a_summary(scripted: Scripted) -> None:
    whole = scripted.answer(THOUGHTS, reasoning={"summary": "auto", "effort": "low"})
    thoughts = whole.output[0]
    assert not thoughts.content and thoughts.summary[0].text == MESSAGES["thoughts"].reasoning
    assert (whole.reasoning.summary, whole.reasoning.effort) == ("auto", "low")
    stream = scripted.answer(THOUGHTS, reasoning={"summary": "auto"}, stream=True)
    deltas = [e.delta for e in stream if e.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == MESSAGES["thoughts"].reasoning


def test_usage(scripted: Scripted) -> None:
    """Thoughts with their marks and the blanks after them are reasoning tokens; the end is not."""
    scripted.answer(THOUGHTS, input="the same prompt " * 4)
    usage = scripted.answer(THOUGHTS, input="the same prompt " * 4).usage
    marks = len(f"<think>\n{MESSAGES['thoughts'].reasoning}\n</think>\n\n")
    assert usage.output_tokens_details.reasoning_tokens == marks
    assert usage.output_tokens == marks + len("Hello!") + 1
    assert usage.input_tokens_details.cached_tokens >= 48
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_logprobs_are_those_of_the_text(scripted: Scripted) -> None:
    whole = scripted.answer(THOUGHTS, include=LOGPROBS, top_logprobs=2)
    (part,) = whole.output[1].content
    assert "".join(one.token for one in part.logprobs[: len("Hello!")]) == "Hello!"
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    stream = list(scripted.answer(THOUGHTS, include=LOGPROBS, stream=True))
    sent = [
        one.token
        for e in stream
        if e.type.endswith("text.delta") and "output" in e.type
        for one in e.logprobs
    ]
    assert "".join(sent) == "Hello!"
    assert not scripted.answer(THOUGHTS).output[1].content[0].logprobs


def test_a_form_is_parsed(scripted: Scripted) -> None:
    pytest.importorskip("llguidance")

    class Answer(BaseModel):
        town: str

    scripted.device.speak('{"town":"Oslo"}')
    found = scripted.client.responses.parse(model="scripted", input=QUESTION, text_format=Answer)
    assert found.output_parsed == Answer(town="Oslo")
    found = scripted.answer("{}", text={"format": {"type": "json_object"}})
    assert (found.output_text, found.text.format.type) == ("{}", "json_object")
    error = scripted.refusal(
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "b"}}}
    )
    assert error["param"] == "text.format.schema" and error["message"].startswith(error["param"])


def test_required_and_allowed_calls(scripted: Scripted) -> None:
    pytest.importorskip("llguidance")
    clock: Any = {"type": "function", "name": "clock"}
    for choice in (clock, {"type": "allowed_tools", "mode": "required", "tools": [clock]}):
        found = scripted.answer(
            "<to No.",
            tools=TOOLS,
            tool_choice=choice,
            max_output_tokens=400,
            parallel_tool_calls=False,
        )
        assert [item.name for item in found.output] == ["clock"]
        assert found.tool_choice.model_dump(exclude_none=True) == choice


def test_a_tool_is_called_and_answered(scripted: Scripted) -> None:
    """The next prompt has the call and its result, as a chat's: by its items or by its id."""
    first = scripted.answer(CALL, tools=TOOLS, instructions="Be short.")
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "12 degrees"},
    ]
    expected = scripted.num_tokens(messages, tools=CHAT_TOOLS)
    by_id = scripted.answer("Cold.", tools=TOOLS, input=[result], previous_response_id=first.id)
    items = [{"role": "user", "content": QUESTION}, *first.output, result]
    by_items = scripted.answer("Cold.", tools=TOOLS, input=items, store=False)
    for found in (by_id, by_items):
        assert found.output_text == "Cold."
        assert found.usage.input_tokens == expected  # without the instructions
    assert by_id.previous_response_id == first.id


def test_a_conversation_by_ids(scripted: Scripted) -> None:
    response, messages = None, [{"role": "system", "content": "Be short."}]
    for question in ("one?", "two?", "three?"):
        response = scripted.answer(
            f"<think>so</think>{question}!",
            input=question,
            instructions="Be short.",
            previous_response_id=None if response is None else response.id,
        )
        messages.append({"role": "user", "content": question})
        assert response.usage.input_tokens == scripted.num_tokens(messages)
        reasoned = {"reasoning_content": "so", "content": f"{question}!"}
        messages.append({"role": "assistant", **reasoned})


def test_stored_responses(scripted: Scripted) -> None:
    client = scripted.client.responses
    made = scripted.answer("Hi", metadata={"topic": "weather"})
    found = client.retrieve(made.id)
    assert found == made and found.metadata == {"topic": "weather"}
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="background=true and stream=true"):
        list(client.retrieve(made.id, stream=True))
    client.delete(made.id)
    kept = scripted.answer("Hi", store=False)
    for missing in (made.id, kept.id, "resp_unknown"):
        for call in (client.retrieve, client.delete, client.cancel):
            with pytest.raises(openai.NotFoundError):
                call(missing)
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.answer("Hi", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_an_answer_that_is_cut_off(scripted: Scripted) -> None:
    whole = scripted.answer("A long text", max_output_tokens=6)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.output_text, whole.output[0].status) == ("A long", "incomplete")
    last = list(scripted.answer(THOUGHTS, max_output_tokens=12, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert [item.type for item in last.response.output] == ["reasoning"]
    follow = scripted.answer("More", input="Go on.", previous_response_id=whole.id)
    assert follow.output_text == "More"


def test_an_empty_answer_has_a_message(scripted: Scripted) -> None:
    for text in ("", "<think>a</think>"):
        whole = scripted.answer(text)
        assert (whole.output_text, whole.output[-1].type) == ("", "message")


def test_a_client_that_leaves_ends_its_response(scripted: Scripted) -> None:
    with scripted.device.held(after=40):
        stream = scripted.answer("x" * 5000, stream=True)
        response_id = next(stream).response.id
        stream.close()
    scripted.server.wait_until_idle()
    with pytest.raises(openai.NotFoundError):
        scripted.client.responses.retrieve(response_id)


def test_a_failure_in_a_stream_is_an_event(scripted: Scripted) -> None:
    with scripted.device.held(after=20):
        fields = {"extra_body": {"timeout": 0.2}}
        events = list(scripted.answer("x" * 100, stream=True, **fields))
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "0.2 s" in last.response.error.message
    assert last.response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    scripted.server.wait_until_idle()
    with scripted.device.held(after=0), pytest.raises(openai.APIStatusError) as caught:
        scripted.answer("x", stream=True, extra_body={"timeout": 0.1})
    assert caught.value.status_code == 408


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_call_that_is_no_json_is_part_of_the_next_turn(
    scripted: Scripted, is_stored: bool
) -> None:
    """The model sees its arguments before the mistake, also where the client sends them."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    prompts: list[int] = []
    for arguments in ('{"a": 1, "b": two}', '{"a": 1}'):
        said = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        first = scripted.answer(said, tools=tools)
        (call,) = first.output
        assert call.arguments == arguments
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "no"}
        fields = {"input": [result], "previous_response_id": first.id}
        if not is_stored:
            fields = {"input": [{"role": "user", "content": QUESTION}, call.to_dict(), result]}
        prompts.append(scripted.answer("ok", tools=tools, **fields).usage.input_tokens)
    assert prompts[0] == prompts[1]


def test_a_response_that_the_server_ends(scripted: Scripted) -> None:
    """As after SIGTERM, and with ``mode=abort`` of the admin routes."""
    with scripted.device.held(after=20):
        stream = scripted.answer("x" * 100, stream=True)
        next(stream)
        scripted.server.loop.call_soon_threadsafe(scripted.server.service.stop_all)
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.output[0].status == "incomplete"
    scripted.server.wait_until_idle()


def test_a_background_response(scripted: Scripted) -> None:
    client = scripted.client.responses
    with scripted.device.held(after=20) as released:
        made = scripted.answer("x" * 100, background=True)
        assert (made.status, made.output) == ("queued", [])
        while (found := client.retrieve(made.id)).status == "queued":
            pass
        assert found.status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still running"):
            scripted.answer("x" * 100, previous_response_id=made.id)
        released.set()
    while (found := client.retrieve(made.id)).status == "in_progress":
        pass
    assert (found.status, found.output_text) == ("completed", "x" * 100)
    assert client.cancel(made.id) == found


def test_a_background_response_is_cancelled(scripted: Scripted) -> None:
    client = scripted.client.responses
    for end in (client.cancel, client.delete):
        with scripted.device.held(after=20):
            stream = scripted.answer("x" * 5000, background=True, stream=True)
            made = next(stream).response
            while next(stream).type != "response.output_text.delta":
                pass
            end(made.id)
            rest = list(stream)
        assert rest[-1].type == "response.incomplete"
        assert rest[-1].response.status == "cancelled"
        if end == client.cancel:
            assert client.retrieve(made.id).status == "cancelled"
        else:
            with pytest.raises(openai.NotFoundError):
                client.retrieve(made.id)
    scripted.server.wait_until_idle()


def test_a_background_stream_is_read_again(scripted: Scripted) -> None:
    """It goes on without its client, who reads the rest, while it runs and afterwards."""
    client = scripted.client.responses
    with scripted.device.held(after=40) as released:
        stream = scripted.answer("x" * 100, background=True, stream=True)
        first = [next(stream) for _ in range(8)]
        assert [event.type for event in first][:3] == [
            *("response.created", "response.queued", "response.in_progress")
        ]
        stream.close()
        rest = client.retrieve(first[0].response.id, stream=True, starting_after=7)
        some = [next(rest)]
        released.set()
        some += rest
    assert [event.sequence_number for event in some] == list(range(8, 8 + len(some)))
    final = some[-1].response
    assert (final.status, final.output_text) == ("completed", "x" * 100)
    again = list(client.retrieve(final.id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in first + some]


def test_a_long_conversation_is_truncated(scripted: Scripted) -> None:
    """Whole turns are left out at the beginning, but no instructions."""
    turns = [
        {"role": role, "content": f"{number} " + "y" * 700}
        for number in range(8)
        for role in ("user", "assistant")
    ]
    turns.append({"role": "user", "content": "z"})
    fields: Any = {"input": turns, "instructions": "Be short.", "max_output_tokens": 100}
    error = scripted.refusal(**fields)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    found = scripted.answer("ok", truncation="auto", **fields)
    system = {"role": "system", "content": "Be short."}
    assert found.usage.input_tokens == scripted.num_tokens([system, *turns[6:]])
    assert found.usage.input_tokens < 8092 < scripted.num_tokens([system, *turns[4:]])
    turns[-1] = {"role": "user", "content": "z" * 9000}
    assert scripted.refusal(**fields, truncation="auto")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]},
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "name": "a", "call_id": "b", "arguments": "[]"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "b"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[3].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]},
            },
            "tool_choice.tools[0]",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9000}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(scripted: Scripted, fields: Any, param: str) -> None:
    error = scripted.refusal(**fields)
    assert error["param"] == param, error
    assert param in error["message"]


def test_the_store_is_bounded() -> None:
    engine, device = scripted_engine("qwen3")
    device.speak("Hi")
    with serving(engine, max_stored_responses=2) as server:
        made = [server.post(RESPONSES, input=str(number)).json()["id"] for number in range(3)]
        with server.client() as client:
            codes = [client.get(f"{RESPONSES}/{one}").status_code for one in made]
        assert codes == [404, 200, 200]
    with serving(engine, max_stored_responses=0) as server:
        answer = server.post(RESPONSES, input="x", background=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
        assert "--max-stored-responses" in answer.text
