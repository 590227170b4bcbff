"""Chat templates x thinking x forms x words of the model: the messages that clients have to see.

Owns: ``run`` for the cases of one template, each whole and streamed. As a program,
``python -m kit.answer_matrix SHARE FOLDER...`` runs a share of them for the templates in folders.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxinfer.core.errors import JaxinferError
from jaxinfer.text.answers.formats import AnswerFormat, answer_format
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tool_texts import written_calls
from kit import ollama_answers
from kit.scripted import ScriptedDevice, scripted_engine
from kit.server import Serving, serving

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TAG = {
    "type": "tag",
    "begin": "<n>",
    "content": {"type": "regex", "pattern": "[0-9]"},
    "end": "</n>",
}
# by kind: the fields of a chat, and an answer in the form
FORMS: Mapping[str, tuple[Mapping[str, Any], str]] = MappingProxyType(
    {
        "json_schema": (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            '{"n": 7}',
        ),
        "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1]}'),
        "regex": ({"structured_outputs": {"regex": "[a-c]{3}"}}, "abc"),
        "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "no"),
        "grammar": ({"structured_outputs": {"grammar": 'start: "x" | "yy"'}}, "yy"),
        "tag": ({"structured_outputs": {"structural_tag": {"format": TAG}}}, "<n>7</n>"),
    }
)
FUNCTION = {
    "name": "weather",
    "description": "The weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = ("weather", {"city": "Rome"})
TOOLS = ("auto", "strict", "required", "named", "json_schema and tools", "regex and tools")
THINKING: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "absent": {},
        "on": {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        "off": {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        "none": {"reasoning_effort": "none"},
    }
)
SAID = ("text", "thinks, text", "call", "thinks, call", "text, call", "call in thoughts")
QUESTION = [{"role": "user", "content": "Is it warm?"}]
WORDS = "It is warm."
APIS = ("chat", "responses", "messages", "ollama")


class Case(NamedTuple):
    """A request, and what the scripted model says."""

    thinking: str
    form: str
    said: str
    api: str


class Seen(NamedTuple):
    """The message that a client gets."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments
    ends: str = ""  # as chats call it


def cases() -> Iterator[Case]:
    """All of a template."""
    for thinking in THINKING:
        for form in (*FORMS, *TOOLS):
            for said in SAID:
                for api in APIS:
                    of_chats_only = (
                        form in FORMS and form != "json_schema" or form.startswith("regex")
                    )
                    if api == "ollama" and form in ("required", "named"):
                        continue
                    if (form in TOOLS or "call" not in said) and (
                        api == "chat" or not of_chats_only
                    ):
                        yield Case(thinking, form, said, api)


class Template:
    """A chat template with a server whose model says what a case demands."""

    def __init__(self, source: str, server: Serving, device: ScriptedDevice) -> None:
        self._source, self._server, self._device = source, server, device
        self._program = ChatTemplate(source, special_tokens={"bos_token": "", "eos_token": ""})

    @property
    def takes_questions(self) -> bool:
        """True if it renders the chat of the cases."""
        try:
            return bool(self._program.render(QUESTION))
        except JaxinferError:
            return False

    def check(self, case: Case) -> bool:
        """Send the case whole and streamed; False if it cannot be with this template."""
        has_tools = case.form in TOOLS
        found = answer_format(self._source, with_tools=has_tools)
        script = self._script(case, found)
        if script is None:
            return False
        said, expected = script
        self._device.speak(said)
        path, body = request(case)
        whole = read(case.api, self._server.post(path, stream=False, **body).json())
        streamed = read_stream(case.api, self._server.post(path, stream=True, **body).text)
        assert streamed == whole, f"{case} streamed {streamed}, whole {whole}, said {said!r}"
        if case.said == "text, call":  # blanks before a call are of either
            whole = whole._replace(content=whole.content.rstrip())
        if expected is not None:
            assert whole == expected, f"{case} gave {whole}, not {expected}; said {said!r}"
        return True

    def _script(self, case: Case, found: AnswerFormat | None) -> tuple[str, Seen | None] | None:
        """The words of the model, and the message that has to come of them (None: any)."""
        thinks = bool(found and found.has_reasoning)
        if case.api == "ollama" and case.thinking == "on" and not thinks:
            return None  # refused
        is_open, is_closed = self._thoughts(case, found) if thinks else (False, True)
        wants_thoughts = case.said.startswith("thinks")
        if wants_thoughts and is_closed or case.said == "call in thoughts" and is_closed:
            return None
        before, reasoning = "", ""
        if found is not None and (wants_thoughts or is_open):
            before = ("" if is_open else found.think_begin) + "hm" + found.think_end
            reasoning = "hm"
        form = case.form.removesuffix(" and tools")
        text = FORMS[form][1] if form in FORMS else WORDS
        if found is not None and found.answer_begin:
            text = found.answer_begin + text
        calls = None if found is None else found.calls
        if case.form not in TOOLS:
            return before + text, Seen(reasoning, FORMS[form][1], (), "stop")
        assert calls is not None and found is not None
        if calls.is_generic and form not in FORMS:
            text = calls.answer_begin + json.dumps(text) + calls.answer_end
        written = written_calls(calls, [CALL], 0)
        arguments = json.dumps(CALL[1], separators=(",", ":"))
        called = Seen(reasoning, "", (("weather", arguments),), "tool_calls")
        must_call = case.form in ("required", "named")
        if case.form == "named":
            called = called._replace(ends="stop" if case.api == "chat" else "tool_calls")
        match case.said.removeprefix("thinks, "):
            case "call":
                return before + written, called
            case "text" if not must_call:
                return before + text, Seen(
                    reasoning, FORMS[form][1] if form in FORMS else WORDS, (), "stop"
                )
            case "text, call" if form == "auto" and calls.triggers:
                glue = "<|end|><|start|>assistant" if found.answer_begin else "\n\n"
                return before + text + glue + written, called._replace(content=WORDS)
            case "call in thoughts" if form == "auto":
                return ("" if is_open else found.think_begin) + "hm\n" + written, None
            case _:
                return None

    def _thoughts(self, case: Case, found: AnswerFormat) -> tuple[bool, bool]:
        """Two truths: the prompt has opened the thoughts; it has closed them."""
        variables = {**THINKING[case.thinking].get("chat_template_kwargs", {})}
        if case.thinking == "none" or (case.api, case.thinking) == ("ollama", "off"):
            variables = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
        if case.form in TOOLS:
            variables["tools"] = [{"type": "function", "function": FUNCTION}]
        prompt = self._program.render(QUESTION, variables=variables, calls=found.calls)
        tail = prompt.rstrip()[-200:]
        begin, end = found.think_begin.strip(), found.think_end.strip()
        is_closed = bool(end) and tail.endswith(end)
        opens = found.template.thinks_first or tail.endswith(begin)
        return opens and not is_closed, is_closed


def request(case: Case) -> tuple[str, dict[str, Any]]:
    """The path and the body of a case."""
    variables = dict(THINKING[case.thinking])
    form, has_tools = case.form.removesuffix(" and tools"), case.form in TOOLS
    function = {**FUNCTION, "strict": True} if case.form == "strict" else FUNCTION
    choice = {"required": "required", "named": NAMED}.get(case.form, "auto")
    if case.api == "chat":
        fields: dict[str, Any] = {"messages": QUESTION, "max_tokens": 400, **variables}
        fields |= FORMS[form][0] if form in FORMS else {}
        if has_tools:
            fields |= {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
        return "/v1/chat/completions", fields
    if case.api == "ollama":
        schema = SCHEMA if form == "json_schema" else None
        given = (QUESTION, case.thinking, schema, function if has_tools else None)
        return "/api/chat", ollama_answers.body(*given)
    effort = variables.pop("reasoning_effort", None)
    if case.api == "responses":
        fields = {"input": "Is it warm?", "max_output_tokens": 400, **variables}
        if effort is not None:
            fields["reasoning"] = {"effort": effort}
        if form == "json_schema":
            fields["text"] = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        if has_tools:
            named = {"type": "function", "name": "weather"}
            fields["tools"] = [{"type": "function", **function}]
            fields["tool_choice"] = named if case.form == "named" else choice
        return "/v1/responses", fields
    fields = {"messages": QUESTION, "max_tokens": 400, **variables}
    if effort is not None:
        fields["thinking"] = {"type": "disabled"}
    if form == "json_schema":
        fields["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    if has_tools:
        strict = {"strict": True} if case.form == "strict" else {}
        fields["tools"] = [
            {
                "name": "weather",
                "description": "The weather.",
                "input_schema": FUNCTION["parameters"],
                **strict,
            }
        ]
        kinds = {"required": {"type": "any"}, "named": {"type": "tool", "name": "weather"}}
        fields["tool_choice"] = kinds.get(case.form, {"type": "auto"})
    return "/v1/messages", fields


def compact(arguments: str) -> str:
    """JSON without blanks."""
    return json.dumps(json.loads(arguments), separators=(",", ":"))


def read(api: str, answer: Any) -> Seen:
    """The message of a whole answer."""
    if api == "chat":
        assert "choices" in answer, answer
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [one["function"] for one in message.get("tool_calls") or ()]
        return Seen(
            (message.get("reasoning") or "").strip(),
            message["content"] or "",
            tuple((one["name"], compact(one["arguments"])) for one in calls),
            choice["finish_reason"],
        )
    if api == "responses":
        assert "output" in answer, answer
        items = answer["output"]
        calls = [one for one in items if one["type"] == "function_call"]
        texts = [
            part["text"] for one in items if one["type"] == "message" for part in one["content"]
        ]
        thoughts = [
            part["text"] for one in items if one["type"] == "reasoning" for part in one["content"]
        ]
        ends = "length" if answer["status"] != "completed" else "tool_calls" if calls else "stop"
        named = tuple((one["name"], compact(one["arguments"])) for one in calls)
        return Seen("".join(thoughts).strip(), "".join(texts), named, ends)
    if api == "ollama":
        return Seen(*ollama_answers.said([answer]))
    assert "content" in answer, answer
    return _of_blocks(answer["content"], answer["stop_reason"])


def _of_blocks(blocks: list[Any], reason: str) -> Seen:
    ends = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[reason]
    calls = tuple(
        (one["name"], json.dumps(one["input"], separators=(",", ":")))
        for one in blocks
        if one["type"] == "tool_use"
    )
    thoughts = "".join(one["thinking"] for one in blocks if one["type"] == "thinking")
    texts = "".join(one["text"] for one in blocks if one["type"] == "text")
    return Seen(thoughts.strip(), texts, calls, ends)


def read_stream(api: str, text: str) -> Seen:
    """The message that a stream adds up to."""
    if api == "ollama":
        return Seen(*ollama_answers.said([*map(json.loads, text.splitlines())]))
    frames = [one for one in text.split("\n\n") if one]
    data = [line[6:] for one in frames for line in one.split("\n") if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    assert events, text
    if api == "chat":
        return _of_chunks(events)
    if api == "responses":
        last = events[-1]["response"]
        deltas = {"message": "", "function_call": "", "reasoning": ""}
        kinds = {"output_text": "message", "function_call_arguments": "function_call"}
        for event in events:
            name, _, what = event["type"].removeprefix("response.").rpartition(".")
            if what == "delta":
                deltas[kinds.get(name, "reasoning")] += event["delta"]
        seen = read("responses", last)
        assert deltas["message"] == seen.content and deltas["reasoning"].strip() == seen.reasoning
        arguments = [one["arguments"] for one in last["output"] if one["type"] == "function_call"]
        assert deltas["function_call"] == "".join(arguments)
        return seen
    blocks: list[Any] = []
    reason = ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[-1]
            for name, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                block[key] = block.get(key, "") + delta.get(name, "")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return _of_blocks(blocks, reason)


def _of_chunks(chunks: list[Any]) -> Seen:
    reasoning, content, ends = "", "", ""
    calls: list[list[str]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning") or ""
            content += delta.get("content") or ""
            ends = choice["finish_reason"] or ends
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append(["", ""])
                calls[call["index"]][0] += call["function"].get("name") or ""
                calls[call["index"]][1] += call["function"].get("arguments") or ""
    return Seen(reasoning.strip(), content, tuple((a, compact(b)) for a, b in calls), ends)


def run(
    source: str, share: float = 1.0, seed: int = 0, vocabulary: str = ""
) -> tuple[Counter[str], list[str]]:
    """The numbers of cases that were right, wrong and not possible (refused: the template takes
    none), and what was wrong; a random ``share`` of all. ``vocabulary``: see ``scripted_engine``.
    """
    engine, device = scripted_engine(source=source, vocabulary=vocabulary)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    draw = random.Random(seed)
    with serving(engine) as server:
        template = Template(source, server, device)
        if not template.takes_questions:  # it needs variables of its own, for example
            return Counter({"refused": 1}), []
        for case in cases():
            if draw.random() >= share:
                continue
            try:
                counts["right" if template.check(case) else "not possible"] += 1
            except (AssertionError, JaxinferError, KeyError, ValueError) as error:
                counts["wrong"] += 1
                wrong.append(f"{case}: {type(error).__name__} {error}")
    return counts, wrong


def main() -> None:
    """Run the folders on the command line."""
    total: Counter[str] = Counter()
    share = float(sys.argv[1])
    for folder in sys.argv[2:]:
        for path in sorted(Path(folder).glob("*.jinja")):
            counts, wrong = run(path.read_text("utf-8"), share)
            total += counts
            print(path.name, dict(counts), flush=True)
            for line in wrong[:4]:
                print("   ", line[:400], flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
