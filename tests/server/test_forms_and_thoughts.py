"""A form begins where the thoughts end, whether the prompt or the model has opened them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.server.api.tools import AnswerReading, ToolChoice
from jaxinfer.text.answers.formats import answer_format
from jaxinfer.text.tokenizer import load_tokenizer
from kit.answer_matrix import Seen, read, read_stream
from kit.api_calls import CHATS, ask, events
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving
from kit.tokenizers import tiny_tokenizer_spec

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TAG = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "regex", "pattern": "[0-9]"},
    "end": "</n>",
}
# by kind: the fields of a chat, what the model says, and what its answer has to be
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"response_format": FORM}, '{"n": 7}'),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1]}'),
    "regex": ({"structured_outputs": {"regex": "[a-c]{3}"}}, "abc"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, "yy"),
    "structural_tag": ({"structured_outputs": {"structural_tag": {"format": TAG}}}, "<n>7</n>"),
}


class Prompt(NamedTuple):
    """How a template's prompt ends, and what the model says before its answer."""

    template: str
    variables: dict[str, Any]
    before: str  # in a prompt with opened thoughts only their end
    reasoning: str = ""


PROMPTS = {
    "qwen3, at once": Prompt("qwen3", {}, ""),
    "qwen3, thinks": Prompt("qwen3", {}, "<think>\nhm\n</think>\n\n", "hm"),
    "qwen3, closed": Prompt("qwen3", {"enable_thinking": False}, ""),
    "qwen3.5, opened": Prompt("qwen3.5", {}, "hm\n</think>\n\n", "hm"),
    "qwen3.5, closed": Prompt("qwen3.5", {"enable_thinking": False}, ""),
    "deepseek-v3.1, opened": Prompt("deepseek-v3.1", {"thinking": True}, "hm</think>", "hm"),
    "deepseek-v3.1, closed": Prompt("deepseek-v3.1", {}, ""),
    "deepseek-v4, opened": Prompt("deepseek-v4", {"thinking": True}, "hm</think>", "hm"),
    "deepseek-r1, opened": Prompt("deepseek-r1", {}, "hm\n</think>\n\n", "hm"),
    "smollm3, closed": Prompt("smollm3", {"enable_thinking": False}, ""),
    "gpt-oss, thinks": Prompt(
        "gpt-oss",
        {},
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
        "hm",
    ),
    "gpt-oss, at once": Prompt("gpt-oss", {}, "<|channel|>final<|message|>"),
}


class Server(NamedTuple):
    """A server with one template."""

    server: Serving
    device: ScriptedDevice


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    found: dict[str, Server] = {}
    with ExitStack() as stack:
        for prompt in PROMPTS.values():
            if prompt.template not in found:
                engine, device = scripted_engine(prompt.template)
                found[prompt.template] = Server(stack.enter_context(serving(engine)), device)
        yield found


def said(prompt: Prompt, text: str) -> str:
    """What the model says: no blanks are in the form that follows the mark of thoughts."""
    return re.sub(r"</think>\s*$", "</think>", prompt.before) + text


def chat_of(prompt: Prompt, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How many?"}]
    variables = {"chat_template_kwargs": prompt.variables} if prompt.variables else {}
    return {"messages": messages, "max_tokens": 200, **variables, **fields}


def joined(chunks: list[Any], name: str) -> str:
    deltas = (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"])
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", PROMPTS)
def test_a_form_begins_after_the_thoughts(servers: dict[str, Server], name: str, kind: str) -> None:
    prompt, (fields, text) = PROMPTS[name], FORMS[kind]
    server, device = servers[prompt.template]
    device.speak(said(prompt, text))
    body = chat_of(prompt, **fields)
    choice = ask(server, CHATS, **body)["choices"][0]
    assert choice["message"]["content"] == text
    assert (choice["message"].get("reasoning") or "").strip() == prompt.reasoning
    assert choice["finish_reason"] == "stop"
    body["stream_options"] = {"include_usage": True}
    chunks = events(server.post(CHATS, stream=True, **body))  # its prompt is a prefix hit
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert joined(chunks, "content") == text
    assert joined(chunks, "reasoning").strip() == prompt.reasoning


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}, {"max_tokens": 9}], ids=str)
def test_usage_counts_the_tokens_of_thoughts(servers: dict[str, Server], fields: Any) -> None:
    """Thoughts with their marks, of all choices, as they arrive and at the end."""
    server, device = servers["qwen3"]
    device.speak("<think>\nSix.\n</think>\n\nSeven.")
    thoughts = len("<think>\nSix.\n</think>\n\n")
    body = {"messages": [{"role": "user", "content": "How many?"}], "n": 2, **fields}
    usage = ask(server, CHATS, **body)["usage"]
    count = 2 * min(thoughts, fields.get("max_tokens", thoughts))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *_, before, last = events(server.post(CHATS, stream=True, **body))
    assert before["usage"] == last["usage"]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_model_that_would_say_something_else_is_held(
    servers: dict[str, Server], name: str
) -> None:
    prompt = PROMPTS[name]
    server, device = servers[prompt.template]
    device.speak(said(prompt, '{"m": "seven"}'))
    message = ask(server, CHATS, **chat_of(prompt, response_format=FORM))["choices"][0]["message"]
    assert json.loads(message["content"]).keys() == {"n"}
    assert (message.get("reasoning") or "").strip() == prompt.reasoning


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MARKS = (
    *("<think>a</think> b", "</think>", "<|im_end|>", "[THINK]"),
    "<tool_call><function=f><parameter=n>7</parameter></function></tool_call>",
    "<|end|><|start|>assistant<|channel|>analysis<|message|>c",
)


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["without tools", "with tools"])
@pytest.mark.parametrize("name", PROMPTS)
def test_strings_of_a_form_may_contain_marks(
    servers: dict[str, Server], name: str, tools: list[Any]
) -> None:
    """The marks of thoughts, calls and turns are the string's text there (vLLM's issue 48663)."""
    prompt = PROMPTS[name]
    server, device = servers[prompt.template]
    schema = {**SCHEMA, "properties": {"q": {"type": "string"}}, "required": ["q"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = json.dumps({"q": " ".join(MARKS)})
    device.speak(said(prompt, text))
    body = chat_of(prompt, response_format=form, **({"tools": tools} if tools else {}))
    body["max_tokens"] = 500
    message = ask(server, CHATS, **body)["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (text, None)
    assert (message.get("reasoning") or "").strip() == prompt.reasoning
    chunks = events(server.post(CHATS, stream=True, **body))
    assert joined(chunks, "content") == text
    assert joined(chunks, "reasoning").strip() == prompt.reasoning


MARKED = {"choice": f"It is {' '.join(MARKS)}", "regex": f"<a>{MARKS[0]}{MARKS[-1]}</a>"}
MARKED["json_schema"] = json.dumps({"q": MARKED["choice"]})
FORMS_OF_APIS = {  # schemas of chats are above
    "chat": ("choice", "regex"),
    "responses": (*MARKED,),
    "messages": ("json_schema",),
}


def with_form(api: str, kind: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request whose form has marks of thoughts and calls."""
    schema = {**SCHEMA, "properties": {"q": {"type": "string"}}, "required": ["q"]}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    own: dict[str, Any] = {
        "choice": {"structured_outputs": {"choice": ["no", MARKED["choice"]]}},
        "regex": {"structured_outputs": {"regex": r"<a>(.|\n)*</a>"}},
    }.get(kind, {})
    question = [{"role": "user", "content": "How many?"}]
    match api:
        case "chat":
            return CHATS, {"messages": question, "max_tokens": 500, **own}
        case "responses":
            own = own or {"text": {"format": form}}
            return "/v1/responses", {"input": "How many?", "max_output_tokens": 500, **own}
        case _:
            own = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
            return "/v1/messages", {"messages": question, "max_tokens": 500, **own}


def tools_of(api: str) -> list[Any]:
    """A function in the form of the API."""
    if api == "messages":
        return [{"name": "f", "input_schema": SCHEMA}]
    return [TOOL if api == "chat" else {"type": "function", **TOOL["function"]}]


@pytest.mark.parametrize(
    ("api", "kind"), [(api, kind) for api, kinds in FORMS_OF_APIS.items() for kind in kinds]
)
@pytest.mark.parametrize("name", ["qwen3, thinks", "deepseek-v4, opened", "gpt-oss, thinks"])
def test_marks_within_each_form_of_each_api(
    servers: dict[str, Server], name: str, api: str, kind: str
) -> None:
    prompt = PROMPTS[name]
    server, device = servers[prompt.template]
    device.speak(said(prompt, MARKED[kind]))
    path, body = with_form(api, kind)
    body |= {"chat_template_kwargs": prompt.variables} if prompt.variables else {}
    body["tools"] = tools_of(api)
    whole = read(api, ask(server, path, **body))
    assert whole == Seen(prompt.reasoning, MARKED[kind], (), "stop")
    assert read_stream(api, server.post(path, stream=True, **body).text) == whole


@pytest.mark.parametrize("name", PROMPTS)
def test_the_other_apis(servers: dict[str, Server], name: str) -> None:
    prompt = PROMPTS[name]
    server, device = servers[prompt.template]
    device.speak(said(prompt, '{"n": 7}'))
    variables = {"chat_template_kwargs": prompt.variables} if prompt.variables else {}
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = ask(server, "/v1/responses", input="How many?", text=text, **variables)
    parts = {item["type"]: item["content"][0]["text"] for item in response["output"]}
    assert parts.pop("message") == '{"n": 7}'
    assert parts.pop("reasoning", "").strip() == prompt.reasoning
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    fields = chat_of(prompt, output_config=output)
    blocks = ask(server, "/v1/messages", **fields)["content"]
    assert [one["text"] for one in blocks if one["type"] == "text"] == ['{"n": 7}']
    thoughts = "".join(one["thinking"] for one in blocks if one["type"] == "thinking")
    assert thoughts.strip() == prompt.reasoning


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_thoughts_and_nothing_else(
    servers: dict[str, Server], name: str, budget: int
) -> None:
    prompt = PROMPTS[name]
    server, device = servers[prompt.template]
    device.speak(prompt.before.replace("hm", "h" * 40) + "one two three")
    body = chat_of(prompt, thinking_token_budget=budget)
    message = ask(server, CHATS, **body)["choices"][0]["message"]
    reasoning = (message.get("reasoning") or "").strip()
    if prompt.reasoning:
        assert reasoning == ("h" * 40)[: len(reasoning)] and len(reasoning) <= budget
    else:
        assert (reasoning, message["content"]) == ("", "one two three")


@pytest.mark.parametrize("name", PROMPTS)
def test_stop_strings_are_looked_for_after_the_thoughts(
    servers: dict[str, Server], name: str
) -> None:
    """Models say in their thoughts what the answer must not contain."""
    prompt = PROMPTS[name]
    server, device = servers[prompt.template]
    device.speak(prompt.before.replace("hm", "is 9.8\n\nless?") + "No: 9.8 is more")
    body = chat_of(prompt, stop=["9.8", "\n\n"])
    choice = ask(server, CHATS, **body)["choices"][0]
    reasoning = (choice["message"].get("reasoning") or "").strip()
    assert reasoning == prompt.reasoning.replace("hm", "is 9.8\n\nless?")
    assert (choice["message"]["content"], choice["stop_reason"]) == ("No: ", "9.8")
    chunks = events(server.post(CHATS, stream=True, **body))
    assert joined(chunks, "content") == "No: "
    assert joined(chunks, "reasoning").strip() == reasoning


def test_a_budget_interrupts_no_call_in_thoughts(servers: dict[str, Server]) -> None:
    server, device = servers["qwen3.5"]
    call = "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
    device.speak(f"hm\n{call}")
    body = chat_of(PROMPTS["qwen3.5, opened"], thinking_token_budget=20, tools=[TOOL])
    message = ask(server, CHATS, **body)["choices"][0]["message"]
    (made,) = message["tool_calls"]
    assert made["function"] == {"name": "f", "arguments": '{"n": 7}'}
    assert (message["reasoning"], message["content"]) == ("hm", None)


def test_a_model_that_does_not_think_is_not_led_to_think() -> None:
    """With a forced parser, whose format has thoughts: a form begins at once."""
    engine, device = scripted_engine("smollm2")
    with serving(engine, tool_call_parser="hermes") as server:
        device.speak('<think>\n{"n": 7}')
        message = ask(server, CHATS, **chat_of(PROMPTS["qwen3, at once"], response_format=FORM))
        message = message["choices"][0]["message"]
        assert json.loads(message["content"]).keys() == {"n"} and not message.get("reasoning")


@pytest.mark.parametrize("parser", ["mistral", "mistral_v11"])
@pytest.mark.parametrize("has_marks", [False, True])
def test_marks_that_the_vocabulary_lacks_open_no_thoughts(parser: str, has_marks: bool) -> None:
    """Mistral's models that do not think have none of the marks, which a form would begin with."""
    spec = tiny_tokenizer_spec()
    data = json.loads(str(spec.tokenizer_json))
    marks = ["[THINK]", "[/THINK]"] if has_marks else []
    new = [
        {**data["added_tokens"][0], "id": 261 + n, "content": one} for n, one in enumerate(marks)
    ]
    data["added_tokens"] += new
    tokenizer = load_tokenizer(dataclasses.replace(spec, tokenizer_json=json.dumps(data)))
    special = tokenizer.all_special_tokens
    found = answer_format("", tool_call_parser=parser, special_tokens=special)
    assert found is not None
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    thinking = (
        AnswerReading(found, "").constrained(sampling, ToolChoice(), None, tokenizer).thinking
    )
    assert (thinking and (thinking.begin, thinking.end)) == (
        ((261,), (262,)) if has_marks else None
    )


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("", (True, False)),
        ("<|channel>thought\n", (True, True)),
        ("<|channel>thought\n<channel|>", None),
    ],
)
def test_gemma_4_may_think_again_after_the_results_of_its_calls(
    end: str, state: tuple[bool, bool] | None
) -> None:
    """They are in the same turn, behind thoughts that have ended."""
    tokenizer = load_tokenizer(tiny_tokenizer_spec())
    found = answer_format("", tool_call_parser="gemma4", reasoning_parser="gemma4")
    assert found is not None
    prompt = (
        "<|turn>model\n<|channel>thought\nhm\n<channel|><|tool_call>call:f{n:7}<tool_call|>"
        f"<|tool_response>response:f{{a:1}}<tool_response|>{end}"
    )
    for sampling in (
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)),
        SamplingParams(stop="9"),
    ):
        reading = AnswerReading(found, prompt)
        thinking = reading.constrained(sampling, ToolChoice(), None, tokenizer).thinking
        assert (thinking and (bool(thinking.begin), thinking.is_open)) == state
