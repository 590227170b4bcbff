"""Tools for models whose chat template has none: what the prompt says, and how answers are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest

from kit.api_calls import CHATS, ask, events, refusal
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

pytest.importorskip("llguidance")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": CITY}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
QUESTION = [{"role": "user", "content": "Is it warm in Rome?"}]
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
TEXT = 'It is "warm"\n– 30 °C \\ 🌞.'
ANSWER = f'{{"name": "answer", "arguments": {{"text": {json.dumps(TEXT, ensure_ascii=False)}}}}}'
HISTORY = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello!"},
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": CALL[33:-1]},
            },
            {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "30 degrees"},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
]
# each template, and what its model says before the answer
BEFORE = {
    "smollm2": "",
    "smollm3": "<think>\nhm\n</think>",
    "own-no-system": "",
    "own-unknown-calls": "",
}


class Server(NamedTuple):
    """A server with one template."""

    server: Serving
    device: ScriptedDevice

    def prompt(self, **fields: Any) -> str:
        """The prompt of a chat as text."""
        tokens = ask(self.server, "/tokenize", **fields)["tokens"]
        return ask(self.server, "/detokenize", tokens=tokens)["prompt"]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        found: dict[str, Server] = {}
        for template in BEFORE:
            engine, device = scripted_engine(template)
            found[template] = Server(stack.enter_context(serving(engine)), device)
        yield found


def message_of(server: Serving, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message of an answer, which is the same in a stream, and the reason of its end."""
    fields = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 200, **fields}
    choice = ask(server, CHATS, **fields)["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    streamed: dict[str, Any] = {"content": "", "calls": []}
    for chunk in events(server.post(CHATS, stream=True, **fields)):
        delta = chunk["choices"][0]["delta"]
        streamed["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(streamed["calls"]):
                streamed["calls"].append({"name": "", "arguments": ""})
            for key, value in call["function"].items():
                streamed["calls"][call["index"]][key] += value or ""
    assert streamed["content"] == (message["content"] or "")
    assert streamed["calls"] == [call["function"] for call in message.get("tool_calls") or ()]
    return message, reason


def call_of(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    (call,) = message["tool_calls"]
    assert message["content"] is None
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("template", BEFORE)
def test_a_model_may_call_or_answer(servers: dict[str, Server], template: str) -> None:
    server, device = servers[template]
    device.speak(BEFORE[template] + CALL)
    message, reason = message_of(server)
    assert (call_of(message), reason) == (("weather", {"city": "Rome"}), "tool_calls")
    device.speak(BEFORE[template] + ANSWER)
    message, reason = message_of(server)
    assert (message["content"], message.get("tool_calls"), reason) == (TEXT, None, "stop")
    assert (message.get("reasoning") or "").strip() == ("hm" if BEFORE[template] else "")


@pytest.mark.parametrize("template", BEFORE)
def test_a_call_may_be_required(servers: dict[str, Server], template: str) -> None:
    server, device = servers[template]
    for choice, reason, names in (
        ("required", "tool_calls", ("weather", "clock")),
        ({"type": "function", "function": {"name": "clock"}}, "stop", ("clock",)),
    ):
        device.speak(BEFORE[template] + ANSWER)
        message, found = message_of(server, tool_choice=choice)
        assert call_of(message)[0] in names and found == reason
    device.speak(f"{BEFORE[template]}{CALL}\n{CALL}")  # one call in each answer
    message, _ = message_of(server)
    assert call_of(message) == ("weather", {"city": "Rome"})
    device.speak("Hello")
    assert message_of(server, tool_choice="none")[0]["content"] == "Hello"


@pytest.mark.parametrize("template", BEFORE)
def test_the_other_apis(servers: dict[str, Server], template: str) -> None:
    server, device = servers[template]
    device.speak(BEFORE[template] + CALL)
    flat = [{"type": "function", **one} for one in (WEATHER, CLOCK)]
    response = ask(server, "/v1/responses", input="Is it warm?", tools=flat)
    assert [one["name"] for one in response["output"] if one["type"] == "function_call"] == [
        "weather"
    ]
    named = [{"name": "weather", "input_schema": CITY}]
    fields: dict[str, Any] = {"messages": QUESTION, "tools": named, "max_tokens": 200}
    blocks = ask(server, "/v1/messages", **fields)["content"]
    assert [one["input"] for one in blocks if one["type"] == "tool_use"] == [{"city": "Rome"}]
    device.speak(BEFORE[template] + ANSWER)
    blocks = ask(server, "/v1/messages", **fields)["content"]
    assert [one["text"] for one in blocks if one["type"] == "text"] == [TEXT]


@pytest.mark.parametrize("template", BEFORE)
def test_the_prompt_has_everything(servers: dict[str, Server], template: str) -> None:
    messages = HISTORY if template != "own-no-system" else HISTORY[1:]
    prompt = servers[template].prompt(messages=messages, tools=TOOLS)
    answers = ['{"name": "answer", "arguments": {"text": "Hello!"}}', CALL, "30 degrees", "noon"]
    for text in ("The weather of a city.", "another tool", *answers):
        assert prompt.count(text) == 1, text
    assert prompt.index("The weather of a city.") < prompt.index("Hello")
    # without tools in the request the calls are still there, and an answer is text
    prompt = servers[template].prompt(messages=messages)
    assert '{"city": "Rome"}' in prompt and "30 degrees" in prompt and "noon" in prompt
    assert '"answer"' not in prompt and "call another tool" not in prompt


def test_an_earlier_answer_is_written_as_the_model_wrote_it(servers: dict[str, Server]) -> None:
    server, device = servers["smollm2"]
    device.speak(CALL)
    first = ask(server, CHATS, messages=QUESTION, tools=TOOLS)
    call = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "30"}
    before = servers["smollm2"].prompt(messages=QUESTION, tools=TOOLS)
    after = servers["smollm2"].prompt(messages=[*QUESTION, call, result], tools=TOOLS)
    assert after.startswith(before + CALL)


def test_the_list_of_models_names_the_form(servers: dict[str, Server]) -> None:
    cards = {
        name: httpx.get(server.url + "/v1/models").json()["data"][0]
        for name, (server, _) in servers.items()
    }
    assert {card["tool_call_parser"] for card in cards.values()} == {"generic"}


def test_a_grammar_beside_tools(servers: dict[str, Server]) -> None:
    server, device = servers["smollm2"]
    fields = {"structured_outputs": {"grammar": 'start: "yes" | NO\nNO: /n+o/'}}
    device.speak("nnno")
    assert message_of(server, **fields)[0]["content"] == "nnno"
    device.speak(CALL)
    assert call_of(message_of(server, **fields)[0]) == ("weather", {"city": "Rome"})
    fields = {"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}
    error = refusal(server, CHATS, messages=QUESTION, tools=TOOLS, **fields)
    assert error["param"] == "structured_outputs.grammar" and "itself" in error["message"]


@pytest.mark.parametrize("text", ['{"n": 7}', '{\n  "n": 7\n}'])
def test_a_schema_next_to_tools(servers: dict[str, Server], text: str) -> None:
    server, device = servers["smollm2"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    device.speak(text)
    assert message_of(server, **fields)[0]["content"] == text
    device.speak(CALL)
    assert call_of(message_of(server, **fields)[0]) == ("weather", {"city": "Rome"})


def test_an_answer_that_is_cut_off_shows_no_json(servers: dict[str, Server]) -> None:
    server, device = servers["smollm2"]
    for said in (CALL, ANSWER):
        device.speak(said)
        for length in range(1, len(said.encode())):
            message, reason = message_of(server, max_tokens=length)
            shown = (message["content"] or "").rstrip("\ufffd")  # a character that is cut off
            assert reason == "length" and TEXT.startswith(shown)
            assert message["content"] != ""  # null, as the JSON that it has written is no text
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                assert '{"city": "Rome"}'.startswith(arguments) and call["function"]["name"]
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 9}
    device.speak('{"name": "a"}')
    assert message_of(server, **fields)[0]["content"] == '{"name": '  # the form allows it


def test_what_cannot_be(servers: dict[str, Server]) -> None:
    server = servers["smollm2"].server
    answer = {"type": "function", "function": {"name": "answer"}}
    error = refusal(server, CHATS, messages=QUESTION, tools=[answer])
    assert error["param"] == "tools" and "'answer'" in error["message"]
    messages = [*QUESTION, {"role": "assistant", "content": "It"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    error = refusal(server, CHATS, messages=messages, tools=TOOLS, **options)
    assert "continue_final_message" in error["message"]


def test_tools_that_a_known_template_leaves_out_are_in_the_prompt() -> None:
    engine, device = scripted_engine("deepseek-v3.1")
    with serving(engine) as server:
        prompt = Server(server, device).prompt(messages=QUESTION, tools=TOOLS)
        assert "The weather of a city." in prompt
        assert "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{" in prompt
    engine, device = scripted_engine("smollm2")
    with serving(engine, tool_call_parser="hermes") as server:
        prompt = Server(server, device).prompt(messages=HISTORY, tools=TOOLS)
        assert "The weather of a city." in prompt and prompt.count("<tool_call>") == 3
