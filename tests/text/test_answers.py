"""Answers of each format are read as the message that was written, however the text is divided."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError, TokenizerError
from jaxinfer.server.api.tools import hidden_pattern
from jaxinfer.text.answers.call_elements import element_value
from jaxinfer.text.answers.formats import FORMATS, answer_format
from jaxinfer.text.answers.parser import AnswerParser, Part
from jaxinfer.text.answers.template import read_template
from jaxinfer.text.tokenizer import load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.answer_parts import calls_of, message_of, texts_of
from kit.answer_texts import END_MARKS, MESSAGES, TOOLS, WRITERS, Message
from kit.tokenizers import DATA, tiny_tokenizer_json

TEMPLATES = DATA.parent / "chat_templates"
NO_THOUGHTS = ("llama3_json",)


def template_of(name: str):
    found = answer_format("", tool_call_parser=name)
    assert found is not None
    return found.template


def read(parser: AnswerParser, pieces: Iterable[str], *, is_cut: bool = False) -> Message:
    parts: list[Part] = [part for piece in pieces for part in parser.feed(piece)]
    return message_of([*parts, *parser.finish(is_cut=is_cut)])


def pieces_of(data: bytes, cuts: Iterable[int]) -> list[str]:
    """The text in pieces that end at these bytes, as a detokenizer would send them."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    ends = [0, *cuts, len(data)]
    return [decoder.decode(data[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def cases():
    for name in WRITERS:
        for case, message in MESSAGES.items():
            if not (
                name in NO_THOUGHTS and (message.reasoning or message.content and message.calls)
            ):
                yield pytest.param(name, message, id=f"{name}-{case}")
        odd = Message(calls=(("save", {"text": END_MARKS[name]}), ("clock", {})))
        yield pytest.param(name, odd, id=f"{name}-end mark in an argument")


@pytest.mark.parametrize(("name", "message"), list(cases()))
def test_whole_and_cut_at_every_byte(name: str, message: Message) -> None:
    template, data = template_of(name), WRITERS[name](message).encode()

    def parser() -> AnswerParser:
        return AnswerParser(template, "", tools=TOOLS)

    assert read(parser(), [data.decode()]) == message
    for cut in range(1, len(data)):
        assert read(parser(), pieces_of(data, [cut])) == message, data[:cut]
    assert read(parser(), pieces_of(data, range(1, len(data)))) == message


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v31", "mistral"])
def test_a_text_after_thoughts_may_name_their_marks(name: str) -> None:
    """Thoughts begin again among the text only in a format that says that they repeat."""
    text = "Between <think> and </think>, or [THINK] and [/THINK], it thinks."
    message = Message(text, (("clock", {}),), "hm")
    template, data = template_of(name), WRITERS[name](message).encode()
    for cuts in ([], range(1, len(data)), *([cut] for cut in range(1, len(data)))):
        parser = AnswerParser(template, "", tools=TOOLS)
        assert read(parser, pieces_of(data, cuts)) == message, cuts
    # behind a call the model may think again
    again = WRITERS[name](Message("", (), "hm")).encode()
    found = read(AnswerParser(template, "", tools=TOOLS), [(data + again + b"x").decode()])
    assert (found.reasoning, found.content) == ("hmhm", text + "x")


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_has_the_arguments_so_far(name: str) -> None:
    """max_tokens may end an answer anywhere; text that has begun no call is content."""
    two = Message(
        calls=(("weather", {"city": "Zürich"}), ("save", {"path": "/tmp/x", "text": "a b"}))
    )
    text = WRITERS[name](two)
    parser = AnswerParser(template_of(name), "", tools=TOOLS)
    whole = calls_of([*parser.feed(text), *parser.finish()])
    seen = set()
    for end in range(1, text.index("a b") + 3):
        streamed = AnswerParser(template_of(name), "", tools=TOOLS)
        parts = [part for piece in text[:end] for part in streamed.feed(piece)]
        parts += streamed.finish(is_cut=True)
        parser = AnswerParser(template_of(name), "", tools=TOOLS)
        at_once = [*parser.feed(text[:end]), *parser.finish(is_cut=True)]
        calls, content = calls_of(parts), texts_of(parts)[0]
        assert (calls, content) == (calls_of(at_once), texts_of(at_once)[0])
        assert calls or content or end <= text.index("weather") + 40  # within the marks before
        for call, expected in zip(calls, whole, strict=False):
            assert call.name == expected.name and expected.arguments.startswith(call.arguments)
            assert call.is_whole == (call.arguments == expected.arguments)
        assert all(one.is_whole for one in calls[:-1])
        seen.add(tuple(one.arguments for one in calls))
    assert len(seen) > 4


@pytest.mark.parametrize(
    ("source", "name"),
    [
        # the words in which Llama 3.1 to 3.3 are told of the form; only 3.2 has no <|python_tag|>
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument '
            "name and its value}.",
            "llama3_json",
        ),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "hermes"),
        ("<tool_call>\n<invoke name=f>", "generic"),
        ("{{ messages }}", "generic"),
    ],
)
def test_the_form_of_calls_is_found(source: str, name: str) -> None:
    found = answer_format(source, with_tools=True)
    assert found is not None and found.name == name and found.has_calls
    without = answer_format(source)
    assert without is None if name == "generic" else without == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {"[" * 5000}}}</tool_call>'),
        ("mistral", "[TOOL_CALLS] [not JSON]"),
        ("llama3_json", '{"name": "Ada", "born": 1815}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1} and more'),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>"),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>x<|tool_call_end|>",
        ),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    found = read(AnswerParser(template_of(name), "", tools=TOOLS), ["x" * (name == "hermes"), text])
    assert not found.calls
    assert text in found.content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "\\ud800"}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{<｜tool▁call▁end｜>"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>{"),
    ],
)
def test_a_call_after_a_mark_may_be_of_any_tool(name: str, text: str) -> None:
    """Agents tell the model that it has no such tool; what is wrong with its JSON stays, too."""
    parser = AnswerParser(template_of(name), "", tools=TOOLS)
    parts = [*parser.feed("x" * (name == "hermes") + text), *parser.finish()]
    (call,) = calls_of(parts)
    assert call.name == "f" and call.arguments.startswith("{")
    assert texts_of(parts)[0] == "x" * (name == "hermes")


def test_the_answer_continues_the_prompt() -> None:
    """The prompt may have opened the thoughts, or opened and closed them."""
    for end, text, expected in (
        ("<think>\n", "a\n</think>\n\nb", Message("b", reasoning="a")),
        ("<think>\n\n</think>\n\n", "a", Message("a")),
        ("", "<think>\na\n</think>\n\nb", Message("b", reasoning="a")),
        ("", "a <think> b", Message("a ", reasoning="b")),
    ):
        prompt = f"<|im_start|>user\n<think> x<|im_end|>\n<|im_start|>assistant\n{end}"
        assert read(AnswerParser(template_of("hermes"), prompt), [text]) == expected


def test_special_tokens_are_left_out() -> None:
    hidden = hidden_pattern(["<|im_end|>", "<|im_start|>", "<tool_call>", None])
    for text in ("a<|im_end|>b<|im_start|>", "<|im_end|>a<|im_end|><|im_end|>b"):
        for cut in range(len(text)):
            parser = AnswerParser(template_of("hermes"), "", hidden=hidden)
            assert read(parser, [text[:cut], text[cut:]]) == Message("ab")
    call = WRITERS["hermes"](MESSAGES["text and call"])
    parser = AnswerParser(template_of("hermes"), "", hidden=hidden)
    assert read(parser, [call]) == MESSAGES["text and call"]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45"])
@pytest.mark.parametrize("before", ["", "<think>", "<tool_call>"])
def test_endless_white_space_takes_little_time(name: str, before: str) -> None:
    """Models get caught in such loops; the time for a run is about linear in its length."""
    parser, start = AnswerParser(template_of(name), ""), time.process_time()
    parser.feed(before)
    for _ in range(1000):
        parser.feed("\n" * 10)
    found = [*parser.feed("x"), *parser.finish()]
    assert "x" in found[0][0]
    assert time.process_time() - start < 2.0  # 0.1; with a search at each position above 30


@pytest.mark.parametrize(
    ("name", "begun", "more"),
    [
        ("hermes", "<think>hm", "\n"),
        ("llama3_json", "hm", "\n"),
        ("mistral", "[TOOL_CALLS]", "x"),
    ],
)
def test_text_that_may_become_a_mark_for_long(name: str, begun: str, more: str) -> None:
    parser, start = AnswerParser(template_of(name), "", tools={"f": {}}), time.process_time()
    parser.feed(begun)
    for _ in range(3_000):
        parser.feed(4 * more)
    parser.finish()
    assert time.process_time() - start < 1.0  # 0.03; with a search at each piece 2.5 to 7


FOUND = {
    "qwen2.5": ("hermes", False),
    "qwen3": ("hermes", True),
    "qwen3-coder": ("qwen3_coder", False),
    "qwen3.5": ("qwen3_coder", True),
    "seed-oss": ("seed_oss", True),
    "deepseek-v3.1": ("deepseek_v31", True),
    "deepseek-r1": ("deepseek_v3", True),
    "mistral-nemo": ("mistral", False),
    "smollm3": ("think", True),
    "smollm2": (None, False),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_format_is_found_from_the_chat_template(name: str) -> None:
    found = answer_format((TEMPLATES / f"{name}.jinja").read_text())
    expected, thinks = FOUND[name]
    assert (None if found is None else found.name) == expected
    assert (found is not None and found.has_reasoning) == thinks


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('<tool_calls>\n{"name": <tool-name>, "arguments": <args-json-object>}', "minimax"),
        ('<longcat_tool_call>\n{"name": <name>, "arguments": <args>}', "longcat"),
        ('<minimax:tool_call>\n<invoke name="tool-name-1">', "minimax_m2"),
        ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "', "cohere_command"),
        (
            "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke",
            "step3",
        ),
    ],
)
def test_the_format_is_found_from_a_part_of_a_published_template(source: str, name: str) -> None:
    found = answer_format(source)
    assert found is not None and found.name == name and not found.has_reasoning


@pytest.mark.parametrize(
    ("source", "name", "answer"),
    [
        (
            "<|START_THINKING|><|START_ACTION|>tool_name",
            "cohere_command",
            "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hello<|END_RESPONSE|>",
        ),
        (
            "{% set inner = '<|inner_prefix|>' %}{% set tools = '<|tools_prefix|>' %}",
            "apertus",
            "<|inner_prefix|>hm<|inner_suffix|>Hello",
        ),
    ],
)
def test_thoughts_between_tokens_of_their_own(source: str, name: str, answer: str) -> None:
    for with_tools in (False, True):
        found = answer_format(source, with_tools=with_tools)
        assert found is not None and found.name == name and found.has_reasoning
        for size in (1, len(answer)):
            parser = AnswerParser(found.template, "")
            pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
            parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
            assert texts_of(parts)[:2] == ("Hello", "hm")


def test_the_thoughts_of_minimax_m3() -> None:
    """Its template has other tags of thoughts, and a mark before each tag."""
    source = "{{ '<mm:think>' }}{{ '</mm:think>' }}{% set ns_token = ']<]minimax[>[' %}"
    for with_tools in (False, True):
        found = answer_format(source, with_tools=with_tools)
        assert found is not None and found.think_begin == "<mm:think>"
        assert found.name == "minimax_m3" and found.has_calls
        parser = AnswerParser(found.template, "")
        assert texts_of(parser.feed("<mm:think>hm</mm:think>Hello"))[1] == "hm"


def test_the_thoughts_of_openpangu() -> None:
    """Its template shows none: it thinks if the mark is a token."""
    source = "{{ '[unused9]助手：' + message['content'] + '[unused10]' }}"
    found = answer_format(source, special_tokens=("[unused16]",))
    assert found is not None and found.name == "pangu" and found.thinks
    parser = AnswerParser(found.template, "[unused9]用户：Hi[unused10][unused9]助手：")
    parts = parser.feed("[unused16]hm[unused17]Hello")
    assert texts_of(parts + parser.finish())[:2] == ("Hello", "hm")
    plain = answer_format(source)
    assert plain is not None and not plain.has_reasoning and plain.has_calls


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "array"}, "", []),
        ({"type": "object"}, " ", {}),
        ({"type": "array"}, "<*item>1<*/item>", [1]),
        ({"type": "array", "items": {"type": "string"}}, "<*item>1<*/item>", ["1"]),
        ({"type": "object"}, "<*a>1<*/a><*a>x<*/a>", {"a": [1, "x"]}),
        ({"properties": {"item": {"type": "string"}}}, "<*item>1<*/item>", {"item": "1"}),
        ({"items": {"type": "string"}}, "<*item><*b>1<*/b><*/item>", ["*<b>1*</b>"]),
        (None, "<*a><*b>true<*/b><*/a>", {"a": {"b": True}}),
        (None, "<*a>no end", "<*a>no end"),
        ({"type": "string"}, "some <*a>tag<*/a>", "some <*a>tag<*/a>"),
    ],
)
def test_the_values_of_elements(schema: Any, text: str, expected: Any) -> None:
    assert element_value(text.replace("<*", "*<"), "*", schema, None) == (
        expected.replace("<*", "*<") if isinstance(expected, str) else expected
    )


@pytest.mark.parametrize("parser", [None, "mistral", "mistral_v11"])
def test_mistrals_models_think_if_the_template_or_a_token_has_the_mark(parser: str | None) -> None:
    source = (TEMPLATES / "mistral-nemo.jinja").read_text()

    def thinks(chat_template: str, *special_tokens: str) -> bool:
        found = answer_format(chat_template, tool_call_parser=parser, special_tokens=special_tokens)
        return found is not None and found.thinks and bool(found.think_end)

    assert not thinks(source, "[INST]")
    assert thinks(source, "[INST]", "[THINK]", "[/THINK]")
    assert thinks(source + "{# [THINK] #}")


def test_a_forced_parser_makes_no_model_think() -> None:
    source = (TEMPLATES / "qwen2.5.jinja").read_text()
    found = answer_format(source, tool_call_parser="hermes")
    assert found is not None and found.has_reasoning and not found.thinks
    named = answer_format(source, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    assert named is not None and named.thinks


@pytest.mark.parametrize(
    "name", [name for name, (found, _) in FOUND.items() if found not in (None, "think")]
)
def test_calls_that_a_chat_template_writes_are_read(name: str) -> None:
    """The text that the model's own template writes for a call is read as that call."""
    source = (TEMPLATES / f"{name}.jinja").read_text()
    spec = TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(),
        tokenizer_config={"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
        chat_template=source,
    )
    tokenizer, found = load_tokenizer(spec), answer_format(source)
    assert found is not None
    arguments = {"path": "ß.txt", "text": "a\nb", "size": 2.5, "force": True}
    function = {"name": "save", "arguments": json.dumps(arguments)}
    question = {"role": "user", "content": "a question"}
    call = {"id": "call00000", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "save", "parameters": {"type": "object"}}}]
    options = {"add_generation_prompt": False, "template_kwargs": {"tools": tools}}
    before = tokenizer.render_chat([question], **options)
    after = tokenizer.render_chat([question, answer], **options)
    assert after.startswith(before)
    text = after[len(before) :].removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    text = text.removesuffix("<|eos|>").removesuffix("<｜end▁of▁sentence｜>")
    message = read(AnswerParser(found.template, "", tools=TOOLS), [text])
    assert message.calls == (("save", arguments),)


def test_forced_parsers() -> None:
    chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    forced = answer_format(
        chat_template, tool_call_parser="mistral", reasoning_parser="deepseek_r1"
    )
    assert forced is not None and (forced.name, forced.think_end) == ("mistral", "</think>")
    without = answer_format(chat_template, tool_call_parser="none", reasoning_parser="none")
    assert without is None
    for setting in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"{setting} 'some' is unknown; use one of .*hermes"):
            answer_format(chat_template, **{setting: "some"})
    for name in FORMATS:
        assert answer_format("", tool_call_parser=name) is not None


OWN = {
    "start_anchor": "<a>",
    "fields": {
        "thinking": {"open": "[t]", "close": "[/t]", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\[call (?P<name>\w+)\]",
            "close": "[/call]",
            "content": "kv-lines",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "[end]", "content": "text"},
    },
}


def test_a_template_of_the_tokenizer_wins() -> None:
    """In transformers' form: texts are stripped, and values typed by the tools' schemas."""
    found = answer_format((TEMPLATES / "qwen3.jinja").read_text(), OWN)
    assert found is not None
    text = " [t] thoughts [/t] an answer \n[call weather]\ncity: Rom\ndays: 3\n[/call] [end]"
    expected = Message("an answer", (("weather", {"city": "Rom", "days": 3}),), "thoughts")
    for cut in range(len(text)):
        parser = AnswerParser(found.template, "x<a>", tools=TOOLS)
        assert read(parser, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "it must be an object"),
        ({**OWN, "version": 2}, "version 2 is not supported"),
        ({**OWN, "other": 1}, "unknown entry 'other'"),
        ({"fields": OWN["fields"]}, "start_anchor or start_anchor_pattern is required"),
        ({"start_anchor": "a", "fields": {}}, "fields must be an object that is not empty"),
        ({"start_anchor": "a", "fields": {"b": {"open_pattern": "("}}}, "invalid pattern"),
        ({"start_anchor": "a", "fields": {"b": {"content": "yaml"}}}, "'yaml' is unknown"),
        ({"start_anchor": "a", "fields": {"b": {}, "c": {}}}, "only one field without open"),
        ({"start_anchor": "a", "fields": {"b": {"open": "", "close": "x"}}}, "must be text"),
    ],
)
def test_unusable_templates(given, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        read_template(given)


def test_python_calls() -> None:
    text = "[weather(city='Rom\\'s', days=3), save(tags=['a', {'b': None}], force=True)]"
    calls = (
        ("weather", {"city": "Rom's", "days": 3}),
        ("save", {"tags": ["a", {"b": None}], "force": True}),
    )
    assert read(AnswerParser(template_of("pythonic"), ""), [text]) == Message(calls=calls)
    for wrong in ("[f(1)]", "[f(x=g())]", "[f(x=1]", "[f(**x)]"):
        assert read(AnswerParser(template_of("pythonic"), ""), [wrong]) == Message(wrong)
