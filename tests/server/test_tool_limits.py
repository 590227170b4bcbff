"""Tools at the limits: names that calls can carry, and what would lose a call or a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from typing import Any

import pytest

from jaxinfer.server.responses.items import input_items, messages_of
from jaxinfer.text.answers.formats import AnswerFormat, answer_format
from jaxinfer.text.answers.parser import AnswerParser
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tool_texts import written_calls
from kit.answer_parts import calls_of, texts_of
from kit.api_calls import CHATS, ask, refusal
from kit.scripted import TEMPLATES, ScriptedDevice, scripted_engine
from kit.server import Serving, serving

pytest.importorskip("llguidance")

FORMS = sorted(
    file.name.removesuffix(".toml")
    for file in resources.files("jaxinfer.text.answers.templates").iterdir()
    if file.name.endswith(".toml") and file.name != "think.toml"
)
PYTHON_NAMES = ("größe", "工具", "a_b", "mcp.get_y")
NAMES = (*PYTHON_NAMES, "mcp.server-x.get_y", "a/b:c", "a@b", "f:0", "f(x)", "a,b", "x=y", "it's")
QUESTION = [{"role": "user", "content": "Is it warm?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}
CALL = {
    "role": "assistant",
    "content": "Hm",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
    ],
}

type Servers = dict[str, tuple[Serving, ScriptedDevice]]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        found: Servers = {}
        for template in ("smollm2", "qwen3", "qwen3-coder"):
            engine, device = scripted_engine(template)
            found[template] = (stack.enter_context(serving(engine)), device)
        yield found


def tools(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**WEATHER, **fields}}]


def form_called(name: str) -> AnswerFormat:
    found = answer_format("", tool_call_parser=name)
    assert found is not None and found.calls is not None
    return found


@pytest.mark.parametrize("form", FORMS)
def test_each_form_reads_every_name_that_a_tool_may_have(form: str) -> None:
    found = form_called(form)
    assert found.calls is not None
    for name in PYTHON_NAMES if form == "pythonic" else NAMES:
        parser = AnswerParser(found.template, "", tools={name: CITY})
        text = written_calls(found.calls, [(name, {"city": "Rome"})], 0)
        (call,) = calls_of([*parser.feed(text), *parser.finish()])
        assert call.name == name, text


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a<b", "a>b", "a{b", "a[0]", "a\x01", "a\u200bb"])
def test_a_name_that_some_form_cannot_carry_is_refused(servers: Servers, name: str) -> None:
    server, _ = servers["smollm2"]
    for choice in ("auto", "required"):
        fields: dict[str, Any] = {"tools": tools(name=name), "tool_choice": choice}
        error = refusal(server, CHATS, messages=QUESTION, **fields)
        assert error["param"] == "tools[0].function.name" and "neither spaces" in error["message"]


def test_a_beam_search_enforces_no_calls(servers: Servers) -> None:
    beams: dict[str, Any] = {"messages": QUESTION, "use_beam_search": True, "max_tokens": 4}
    server, _ = servers["smollm2"]  # each answer with tools is one JSON object
    assert refusal(server, CHATS, tools=tools(), **beams)["param"] == "tools"
    server, _ = servers["qwen3"]
    assert refusal(server, CHATS, tools=tools(strict=True), **beams)["param"] == "tools"
    budget = {"thinking_token_budget": 3}
    assert refusal(server, CHATS, **budget, **beams)["param"] == "thinking_token_budget"
    assert ask(server, CHATS, tools=tools(), **beams)["choices"]  # nothing is enforced


def test_a_call_is_not_continued(servers: Servers) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    server, _ = servers["qwen3"]
    for path in (CHATS, "/tokenize"):
        error = refusal(server, path, messages=[*QUESTION, CALL], **options)
        assert "messages[1] has calls" in error["message"]


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("smollm2", '{"name": "weather", "arguments": {"city": "Rome', '"}}'),
        (
            "qwen3",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome',
            '"}}\n</tool_call>',
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome",
            "\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_a_stop_string_within_a_call_cuts_it_off(
    servers: Servers, template: str, begin: str, end: str
) -> None:
    server, device = servers[template]
    device.speak(f"{begin} or Oslo{end}")
    fields: dict[str, Any] = {"messages": QUESTION, "max_tokens": 200}
    choice = ask(server, CHATS, tools=tools(), stop=[" or"], **fields)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city": "Rome', "stop")
    named = [{"name": "weather", "input_schema": CITY}]
    message = ask(server, "/v1/messages", tools=named, stop_sequences=[" or"], **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " or")
    assert message["content"][0]["input"] == {}
    if "</tool_call>" in end:  # the call is whole
        choice = ask(server, CHATS, tools=tools(), stop=["</tool_call>"], **fields)["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["arguments"], choice["finish_reason"]) == (
            '{"city": "Rome or Oslo"}',
            "tool_calls",
        )


@pytest.mark.parametrize(
    ("said", "limit"), [('{"city": "Rome", "n": 1}', 60), ('{"city": NaN}', 200)]
)
def test_a_response_with_a_broken_call_is_continued(
    servers: Servers, said: str, limit: int
) -> None:
    server, device = servers["qwen3"]
    device.speak(f'<tool_call>\n{{"name": "weather", "arguments": {said}}}\n</tool_call>')
    fields: dict[str, Any] = {"tools": [{"type": "function", **WEATHER}]}
    first = ask(server, "/v1/responses", input="Is it warm?", max_output_tokens=limit, **fields)
    (call,) = first["output"]
    with pytest.raises(ValueError):
        json.loads(call["arguments"], parse_constant=int)
    device.speak("Yes.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "broken"}
    earlier = {"previous_response_id": first["id"]}
    ask(server, "/v1/responses", input=[result], **earlier, **fields)
    if call["status"] == "incomplete":
        turns = [{"role": "user", "content": "Is it warm?"}, call, result]
        ask(server, "/v1/responses", input=turns, **fields)


@pytest.mark.parametrize(
    ("arguments", "left"),
    [('{"a": 1, "b": "x', {"a": 1}), ('{"a', {}), ("", {}), ("[1", {}), ("x", {})],
)
def test_the_arguments_before_the_break_are_in_the_prompt(
    arguments: str, left: dict[str, Any]
) -> None:
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    (message,) = messages_of(input_items([{**item, "status": "incomplete"}]))
    found = message["tool_calls"][0]["function"]["arguments"]
    assert (json.loads(found) if isinstance(found, str) else found) == left


@pytest.mark.parametrize("template", ["deepseek-r1", "deepseek-v3.1", "mistral-nemo", "qwen3"])
@pytest.mark.parametrize("result", ["see <think> tags", "</think>"])
def test_a_result_with_a_mark_of_thoughts_opens_none(template: str, result: str) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    found = answer_format(source)
    assert found is not None
    call = {"id": "c12345678", "type": "function", "function": CALL["tool_calls"][0]["function"]}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c12345678", "content": result},
    ]
    program = ChatTemplate(source, special_tokens={"bos_token": "", "eos_token": ""})
    prompt = program.render(messages, calls=found.calls)
    assert result in prompt
    parser = AnswerParser(found.template, prompt)
    assert texts_of([*parser.feed("It is 30."), *parser.finish()]) == ("It is 30.", "")


@pytest.mark.parametrize(
    ("end", "said", "thought"),
    [("", "ok", ""), ("<think>\n", "hm</think>ok", "hm"), ("<think>\n\n</think>\n\n", "ok", "")],
)
def test_only_the_marks_at_the_end_of_an_unknown_prompt_count(
    end: str, said: str, thought: str
) -> None:
    found = answer_format("<think></think>")
    assert found is not None
    for text in ("what is <think>?", "</think>", "<think>a</think>", ""):
        parser = AnswerParser(found.template, f"[|user|]{text}[|assistant|]{end}")
        assert texts_of([*parser.feed(said), *parser.finish()]) == ("ok", thought)
