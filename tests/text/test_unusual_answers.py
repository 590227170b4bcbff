"""Answers that models write next to the usual ones: whole and in pieces, they are read alike."""

from __future__ import annotations

import pytest

from jaxinfer.text.answers.call_parts import complete_arguments
from jaxinfer.text.answers.formats import AnswerFormat, answer_format
from jaxinfer.text.answers.parser import AnswerParser, Part
from kit.answer_parts import ReadCall, calls_of, message_of, texts_of
from kit.answer_texts import Message

TOOLS = {
    "f": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    "f_2": {"properties": {}},
}
ONE = (("f", {"n": 7}),)
CALL = Message(calls=ONE)


def format_of(name: str) -> AnswerFormat:
    found = answer_format("", tool_call_parser=name)
    assert found is not None
    return found


def parts_of(found: AnswerFormat, prompt: str, text: str, *, is_cut: bool = False) -> list[Part]:
    """The parts of an answer, which are the same if it comes in pieces."""
    at_once = AnswerParser(found.template, prompt, tools=TOOLS)
    parts = [*at_once.feed(text), *at_once.finish(is_cut=is_cut)]
    for size in (1, 3):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parser = AnswerParser(found.template, prompt, tools=TOOLS)
        streamed = [part for piece in pieces for part in parser.feed(piece)]
        streamed += parser.finish(is_cut=is_cut)
        assert calls_of(streamed) == calls_of(parts)
        assert texts_of(streamed) == texts_of(parts)
    return parts


def kimi(call_id: str, arguments: str = '{"n": 7}', s: str = "s") -> str:
    call = f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_call{s}_section_begin|>{call}<|tool_call{s}_section_end|>"


def dsml(**values: tuple[str, str]) -> str:
    tags = [
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>'
        for key, (value, is_text) in values.items()
    ]
    return f'<｜DSML｜invoke name="f">{"".join(tags)}</｜DSML｜invoke>'


def tagged(call: str) -> str:
    return f"<tool_call>{call}</tool_call>"


def coder(*lines: str, after: str = "</function>") -> str:
    """A call in Qwen3-Coder's form with these lines in it, and the end ``after`` them."""
    return "\n".join(("<tool_call>\n<function=f>", *lines, after, "</tool_call>"))


LLAMA = '{"name": "f", "parameters": {"n": 7}}'
LIST = '[{"name": "f", "arguments": {"n": 7}}]'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3_json", f"{LLAMA}\n\nAnything else?", Message("\n\nAnything else?", ONE)),
        ("llama3_json", f"Let me see.\n\n{LLAMA}", Message("Let me see.", ONE)),
        ("llama3_json", f"a\n  {LLAMA}; {LLAMA}\nb", Message("a\nb", ONE * 2)),
        ("llama3_json", f"{LLAMA}\n{LLAMA}", Message("", ONE * 2)),
        ("llama3_json", f"<|python_tag|>{LLAMA}<|eom_id|>", CALL),
        ("llama3_json", 'a {"name": "f"}', Message('a {"name": "f"}')),
        ("llama3_json", '\n{"name": "g", "parameters": {}}', None),
        ("mistral", f"[TOOL_CALLS]{LIST}\n\nDone.", Message("\n\nDone.", ONE)),
        ("mistral", f"I look.[TOOL_CALLS] {LIST}", Message("I look.", ONE)),
        ("mistral", "[TOOL_CALLS] []", None),
        ("mistral_v11", 'a[TOOL_CALLS]f[ARGS]{"n": 7} b', Message("a b", ONE)),
        ("pythonic", "I look.\n[f(n=7)]\nDone.", Message("I look.\nDone.", ONE)),
        ("pythonic", "<|python_start|>[f(n=7)]<|python_end|>", CALL),
        ("pythonic", "[g(n=7)]", None),
        ("pythonic", "[f(s='a]), f(')]", Message(calls=(("f", {"s": "a]), f("}),))),
        ("pythonic", '[f(s="""a"b"""), f()]', Message(calls=(("f", {"s": 'a"b'}), ("f", {})))),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"n": 7} x<|call|>', CALL),
        # what models forget, and what they write too often
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 7}\n</tool_call>', CALL),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 7}}}\n</tool_call>', CALL),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 7}}', CALL),
        ("hermes", '<tool_call>{"arguments": {"n": 7}, "name": "f"}</tool_call>', CALL),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 7}"}</tool_call>', CALL),
        ("hermes", tagged('{"name": "f", "arguments": null}') + "x", Message("x", (("f", {}),))),
        ("hermes", tagged('{"function": {"name": "f", "arguments": {"n": 7}}}'), CALL),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', None),
        ("hermes", tagged('{"name": "f_2"}') + "x", Message("x", (("f_2", {}),))),  # it has none
        ("hermes", tagged('{"name": "g"}'), None),
        ("hermes", "a <tool_call> b", None),
        ("glm45", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>7</tool_call>", CALL),
        ("glm45", "<tool_call>f</tool_call>", Message(calls=(("f", {}),))),
        ("qwen3_coder", "<function=f>\n<parameter=n>\n7\n</function>", CALL),
        ("qwen3_coder", "use <function=f> to call", None),
        # closing tags that Qwen3.5 and 3.6 leave out or write once more
        ("qwen3_coder", coder("<parameter=n>", "7"), CALL),
        ("qwen3_coder", coder("<parameter=n>", "7", "</parameter>", "</parameter>"), CALL),
        ("qwen3_coder", coder("</parameter>", "<parameter=n>", "7", "</parameter>"), CALL),
        *(
            ("qwen3_coder", coder(f"<parameter=n>\n7\n{end}", after=after), CALL)
            for end in ("</parameter>", "")
            for after in ("</function>\n</function>", "</function>\n</function_invocation>", "")
        ),
        ("qwen3_coder", coder("<parameter=s>", "</function>", "</parameter>", after=""),
         Message(calls=(("f", {"s": "</function>"}),))),
        ("qwen3_coder", coder(after=""), Message(calls=(("f", {}),))),
        ("qwen3_coder", f"a\n{tagged(LIST[1:-1])}\n" + coder("<parameter=n>", "7"),
         Message("a", ONE * 2)),
        ("qwen3_coder", f"<think>hm\n{tagged(LIST[1:-1])}\n</think>\n\n", Message("", ONE, "hm")),
        ("qwen3_coder", '<tool_call>{"a": 1}</tool_call>', None),
        # no value, in a format without a word for that
        ("qwen3_coder", coder("<parameter=n>", "</parameter>"), Message(calls=(("f", {}),))),
        ("qwen3_coder", coder("<parameter=n>", "None", "</parameter>"),
         Message(calls=(("f", {"n": None}),))),
        ("qwen3_coder", coder("<parameter=s>", "</parameter>"),
         Message(calls=(("f", {"s": ""}),))),
        ("glm45", tagged("f\n<arg_key>n</arg_key>\n<arg_value></arg_value>"),
         Message(calls=(("f", {}),))),
        ("gemma4", "<|tool_call>call:f{n:7}<tool_call|>", CALL),
        # Python's syntax, and strings without marks
        *(
            ("gemma4", f"<|tool_call>call:f{{{text}}}<tool_call|>", Message(calls=(("f", value),)))
            for text, value in (
                ("a:['b, c', <|\"|>'<|\"|>]", {"a": ["b, c", "'"]}),
                ("a:{'b': 'c', d:True}", {"a": {"b": "c", "d": True}}),
                ("a:[b c, 1.5,None]", {"a": ["b c", 1.5, None]}),
                ("a:'b',n:7", {"a": "b", "n": 7}),
                ("a:it's,n:7", {"a": "it's", "n": 7}),
                ("a:'b, c: {d}.pdf', n:7", {"a": "b, c: {d}.pdf", "n": 7}),
                ("a:'it's, {b', n:7", {"a": "it's, {b", "n": 7}),
                ("a:'b\\'c\\n, d'", {"a": "b'c\n, d"}),
                ("a:'tis so,n:7", {"a": "'tis so", "n": 7}),
                # without the first mark, or with another one
                ("a:'b, c<|\"|>,n:7", {"a": "b, c", "n": 7}),
                ("a:b c <|\"|>,n:7", {"a": "b c", "n": 7}),
            )
        ),
        ("gemma4", "<|tool_call>call:f{s:a b}<tool_call|>", Message(calls=(("f", {"s": "a b"}),))),
        ("gemma4", "<|tool_call>call:f{n:}<tool_call|>", None),
        # a server's name before the tool's, which is also part of some names
        ("gemma4", "<|tool_call>call:a:b:f{n:7}<tool_call|>", CALL),
        ("gemma4", "<|tool_call>call:a:g{n:7}<tool_call|>", Message(calls=(("a:g", {"n": 7}),))),
        ("kimi_k2", '<|tool_call_begin|>f<|tool_call_argument_begin|>x<|tool_call_end|>', None),
        # Kimi-K2: ids that a client has sanitised; marks in the singular
        *(
            ("kimi_k2", kimi(call_id, s=s), CALL)
            for s in ("s", "")
            for call_id in ("functions.f:0", "functions_f_1", "f:12", "f", " functions.f:3 ")
        ),
        ("kimi_k2", kimi("functions.f_2:0", "{}"), Message(calls=(("f_2", {}),))),
        # DeepSeek-V3.2 says which values are text
        ("deepseek_v32", dsml(a=("[1]", "false"), b=("[1]", "true")),
         Message(calls=(("f", {"a": [1], "b": "[1]"}),))),
    ],
)  # fmt: skip
def test_calls(name: str, text: str, expected: Message | None) -> None:
    """``expected`` None: all of the text is content."""
    assert message_of(parts_of(format_of(name), "", text)) == (expected or Message(text))


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("hermes", tagged('{"name": "f", "arguments": {"n": NaN}}'), ['{"n": NaN}'], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 7', ['{"n": 7'], ""),
        ("pythonic", "[f(n=7, s=g())]", ['{"n": 7'], ")]"),
        ("gemma4", "<|tool_call>call:f{n:7,,}<tool_call|>", ['{"n": 7'], ",}<tool_call|>"),
    ],
)  # fmt: skip
def test_a_model_that_breaks_off(name: str, text: str, calls: list[str], content: str) -> None:
    """The beginning of a call has been sent, and stays."""
    parts = parts_of(format_of(name), "", text)
    assert [call.arguments for call in calls_of(parts)] == calls
    assert texts_of(parts)[0].endswith(content)


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "deepseek_v31", "qwen3_coder", "glm45"])
def test_a_call_ends_the_thoughts(name: str) -> None:
    calls = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>',
        "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0'
        '<|tool_call_argument_begin|>{"n": 7}<|tool_call_end|><|tool_calls_section_end|>',
        "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 7}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    }  # fmt: skip
    prompt = "<｜Assistant｜><think>"
    for between in ("", "\n\n"):
        parts = parts_of(format_of(name), prompt, "hm <tool_call> x" + between + calls[name])
        assert message_of(parts) == Message("", ONE, "hm <tool_call> x")


@pytest.mark.parametrize(
    ("name", "prompt", "call", "end"),
    [
        ("qwen3_coder", "<|im_start|>assistant\n<think>", coder("<parameter=n>", "7"), "</think>"),
        ("hermes", "<|im_start|>assistant\n<think>", tagged(LIST[1:-1]), "</think>"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "<|tool_call>call:f{n:7}<tool_call|>",
         "<channel|>"),
    ],
)  # fmt: skip
def test_thoughts_end_behind_the_calls_in_them(name: str, prompt: str, call: str, end: str) -> None:
    """Qwen3.5 does so: the mark that ends its thoughts is no content. It is once."""
    found = format_of(name)
    for text, content in ((f"\n{end}\n\n", ""), (f"{call}\n{end}\n\nA", "A")):
        message = message_of(parts_of(found, prompt, f"hm\n{call}{text}"))
        assert (message.content, message.reasoning) == (content, "hm")
        assert message.calls == ONE * (1 + bool(content))
    message = message_of(parts_of(found, prompt, f"hm\n{call}{end}A {end}"))
    assert message == Message(f"A {end}", ONE, "hm")


R1 = "{{'<｜Assistant｜>'}}{% set x = content.split('</think>') %}"  # of R1-0528 and its distills


@pytest.mark.parametrize(
    ("chat_template", "parser", "prompt", "text", "expected"),
    [
        # the model begins with thoughts: vLLM's deepseek_r1, or a template without an opening tag
        ("", "deepseek_r1", "", "hm\n</think>\n\nA", Message("A", reasoning="hm")),
        ("", "deepseek_r1", "", "<think>\nhm</think>A", Message("A", reasoning="hm")),
        ("", "deepseek_r1", "", "\n<think>hm", Message(reasoning="hm")),
        ("", "deepseek_r1", "<think>\n\n</think>\n\n", "A", Message("A")),
        ("", "deepseek_r1", "<think>", "hm</think>A", Message("A", reasoning="hm")),
        (R1, None, "", "hm</think>A", Message("A", reasoning="hm")),
        (R1 + "<think>", None, "", "hm</think>A", Message("hm</think>A")),
        (R1 + "<think>", "qwen3", "", "hm</think>A", Message("hm</think>A")),
        # a tag that the prompt has opened is left out, and no other
        (R1 + "<think>", None, "<think>", "<think>\nhm</think>A", Message("A", reasoning="hm")),
        (R1 + "<think>", None, "<think>\n", "\n<think>hm", Message(reasoning="hm")),
        (R1 + "<think>", None, "<think>", "a <think> b", Message(reasoning="a <think> b")),
    ],
)
def test_thoughts(
    chat_template: str, parser: str | None, prompt: str, text: str, expected: Message
) -> None:
    found = answer_format(chat_template, reasoning_parser=parser)
    assert found is not None
    assert message_of(parts_of(found, f"<｜Assistant｜>{prompt}", text)) == expected


def test_thoughts_and_calls_of_other_formats() -> None:
    found = answer_format("", tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    assert found is not None
    call = '<tool_call>{"name": "f", "arguments": {"n": 7}}</tool_call>'
    for text, reasoning in ((f"hm</think>{call}", "hm"), (f"hm {call}", "hm"), (call, "")):
        assert message_of(parts_of(found, "", text)) == Message("", ONE, reasoning)


BARE = '{"name": "f", "arguments": {"n": 7}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BARE, CALL),
        (f"```json\n{BARE}\n```", CALL),
        (f"\n```\n{BARE}\n```\n", CALL),
        (f"{{{BARE}}}", CALL),
        ('{{"name": "f", "arguments": {{"n": 7}}}}', CALL),
        ('{"function": "f", "parameters": {}}', None),
        ('{"name": "f", "parameters": {"n": 7}}', CALL),
        ('{"type": "function", "function": {"name": "f", "arguments": {"n": 7}}}', CALL),
        (f"<think>hm</think>\n\n{BARE}", Message("", ONE, "hm")),
        (f"{BARE} is a call", None),
        (f"Here: {BARE}", None),
        (f"{BARE}\n{BARE}", None),
        ('{"name": "g", "arguments": {"n": 7}}', None),
        ('{"name": "Ada", "born": 1815}', None),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"n": 7}', None),
        ("```json\n", None),
    ],
)
def test_an_answer_that_is_one_call_without_marks(text: str, expected: Message | None) -> None:
    found = format_of("hermes")
    assert message_of(parts_of(found, "", text)) == (expected or Message(text))
    marked = message_of(parts_of(found.with_marked_calls(), "", text))
    assert not marked.calls and marked.content == text.removeprefix("<think>hm</think>\n\n")


def test_text_that_can_be_no_call_is_not_held() -> None:
    for text in ('{"name": "g"', '{"n"', "```python", f"{BARE} x"):
        parser = AnswerParser(format_of("hermes").template, "", tools=TOOLS)
        assert texts_of(parser.feed(text + "  \n "))[0].startswith(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1, "b": [2, {"c": 3}]}', {"a": 1, "b": [2, {"c": 3}]}),
        ('{"a": 1, "b": [2, {"c": 3}, ', {"a": 1}),
        ('{"a": "x, {y", "b": "z', {"a": "x, {y"}),
        ('{"a": "x', {}),
        ('{"a": "\\ud800"}', {}),
        ("{" * 5000, {}),
        ('{"a": 1, "b": x, "c": 2}', {"a": 1}),
        ('{"a": 1, "b": "the "c", d", "e": 2}', {"a": 1}),
        ('{"a": 1, "b": [1,], "c": 2}', {"a": 1}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": 1}}', {"a": 1}),
        ('{"a": , "b": 1}', {}),
        ('{"a": "x\n\ty"}', {"a": "x\n\ty"}),
        ("", {}),
    ],
)
def test_the_arguments_of_a_call_that_is_no_json(text: str, expected: dict[str, object]) -> None:
    assert complete_arguments(text) == expected


def test_a_call_that_the_prompt_has_begun() -> None:
    prompt = '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"n": '
    assert calls_of(parts_of(format_of("hermes"), prompt, "7}}</tool_call>")) == [
        ReadCall("f", '{"n": 7}')
    ]
