"""Custom tools as functions: their grammars hold in every form of calls that can write them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.server.api.custom_tools import as_functions, enforceable, input_of
from jaxinfer.server.api.tools import tool_choice
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.responses.tools import chat_tools
from jaxinfer.text.answers.call_parts import CallArguments, CallBegin, CallEnd
from jaxinfer.text.answers.formats import FORMATS, answer_format
from jaxinfer.text.answers.parser import AnswerParser
from jaxinfer.text.answers.structure import calls_tag, strict_tag
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.tokenizer import load_tokenizer
from kit.agent_bodies import PATCH, PATCH_GRAMMAR
from kit.answer_texts import WRITERS, Message
from kit.tokenizers import TINY_EOS_ID, TINY_VOCAB_SIZE, tiny_tokenizer_spec

pytest.importorskip("llguidance")
CALLS = {
    name: found.calls
    for name in FORMATS
    if (found := answer_format("", tool_call_parser=name)) and found.calls
}
QUOTED = ["gemma4", "functiongemma"]  # dialects of JSON, whose texts have their own quotes
CLAUSE = r"(?:GET|PUT) /[a-z]{1,3}\n(?:[a-z\"\\]{1,4}\n){0,2}"


def custom(syntax: str, definition: str) -> Any:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "patch", "format": grammar}}


def drawn_texts(compiler: ConstraintCompiler, tag: Any, num_texts: int = 3) -> list[str]:
    """Random texts of a structural tag, without those that do not end by chance."""
    params = StructuredOutputsParams.of({"structural_tag": tag})
    made, texts = compiler.compile(SamplingParams(structured_outputs=params)), []
    assert made is not None
    for seed in range(num_texts):
        rng, follower, drawn = np.random.default_rng(seed), made.begin(()), bytearray()
        for _ in range(900):
            mask = np.zeros(-(-TINY_VOCAB_SIZE // 32), np.uint32)
            follower.fill(mask)
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            visible = [one for one in tokens if 33 <= one < 127] or tokens
            token = TINY_EOS_ID if TINY_EOS_ID in tokens else int(rng.choice(visible))
            if token == TINY_EOS_ID:
                texts.append(drawn.decode())
                break
            follower.push(token)
            drawn.append(token)
    return texts


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(
        load_tokenizer(tiny_tokenizer_spec()), TINY_VOCAB_SIZE, (TINY_EOS_ID,)
    )


@pytest.mark.parametrize("name", sorted(CALLS.keys() - set(QUOTED)))
def test_grammars_hold_in_calls(compiler: ConstraintCompiler, name: str) -> None:
    """The text that is read from a random call matches, whatever characters the form escapes."""
    chosen = tool_choice(as_functions([custom("regex", CLAUSE)]), "required")
    chosen, broken = enforceable(chosen, CALLS[name])
    assert broken == [] and chosen.has_strict
    functions = list(chosen.functions.values())
    tag = calls_tag(CALLS[name], functions, parallel=False)
    found = answer_format("", tool_call_parser=name)
    assert found is not None
    schemas = {one["name"]: one["parameters"] for one in functions}
    texts = drawn_texts(compiler, tag)
    for text in texts:
        parser = AnswerParser(found.template, "", tools=schemas)
        begin, *arguments, end = [*parser.feed(text), *parser.finish()]
        assert isinstance(begin, CallBegin) and end == CallEnd(True), text
        # models' tags have a line feed on both sides, and readers take one away
        read = input_of("".join(one.text for one in arguments if isinstance(one, CallArguments)))
        assert re.fullmatch(CLAUSE, read) or re.fullmatch(CLAUSE, f"{read}\n"), read
    assert texts


@pytest.mark.parametrize("name", QUOTED)
def test_where_grammars_cannot_hold_it_is_said(compiler: ConstraintCompiler, name: str) -> None:
    chosen, broken = enforceable(
        tool_choice(as_functions([custom("regex", CLAUSE)]), "required"), CALLS[name]
    )
    assert broken == ["'patch': this model's form of calls takes no grammar"]
    assert not chosen.has_strict
    tag = calls_tag(CALLS[name], [*chosen.functions.values()], parallel=False)
    params = StructuredOutputsParams.of({"structural_tag": tag})
    assert compiler.compile(SamplingParams(structured_outputs=params)) is not None


def follows(compiler: ConstraintCompiler, tag: Any, text: str) -> bool:
    params = StructuredOutputsParams.of({"structural_tag": tag})
    made = compiler.compile(SamplingParams(structured_outputs=params))
    assert made is not None
    follower = made.begin(())
    for byte in (*text.encode(), TINY_EOS_ID):
        mask = np.zeros(-(-TINY_VOCAB_SIZE // 32), np.uint32)
        follower.fill(mask)
        if not np.unpackbits(mask.view(np.uint8), bitorder="little")[byte]:
            return False
        follower.push(byte)
    return True


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "llama3_json"])
def test_codex_patches_are_enforced_if_the_model_chooses_to_call(
    compiler: ConstraintCompiler, name: str
) -> None:
    (tool,) = as_functions([custom("lark", PATCH_GRAMMAR)])
    tag = strict_tag(CALLS[name], [tool["function"]], parallel=False)

    def call(text: str) -> str:
        return WRITERS[name](Message(calls=(("patch", {"input": text}),)))

    assert follows(compiler, tag, call(PATCH))
    assert not follows(compiler, tag, call(PATCH.replace("*** Add File", "*** New File")))
    assert not follows(compiler, tag, call(PATCH.removesuffix("*** End Patch")))


def test_the_prompt_describes_the_grammar_once() -> None:
    (tool,) = as_functions([custom("lark", 'start: "a"+ LF\n%import common.LF')])
    function = tool["function"]
    assert function["description"].endswith(
        'follows this Lark grammar:\nstart: "a"+ LF\n%import common.LF'
    )
    assert function["parameters"]["properties"]["input"]["pattern"].startswith("^(?:")


@pytest.mark.parametrize(
    ("definition", "matches", "others"),
    [
        (
            'start: "a" b? | b~2\nb: "x" | "y"i',
            ["a", "ax", "aY", "xy", "Yy"],
            ["", "x", "aX", "axx"],
        ),
        ('start: (A ",")* A\nA: /[0-9]+/', ["1", "1,22"], ["", "1,", "a"]),
        ('start: INT ["." INT]\n%import common.INT', ["1", "1.5"], [".5", "1."]),
        (
            'start: "if" WORD "x"\n%import common.WORD\n%ignore " "',
            ["if a x", " if ax "],
            ["i f a x"],
        ),
        ('start: "a".."c"~1..2', ["a", "cb"], ["d", "abc", ""]),
        ('?start.2: a\n   | "."  // a comment\na: /\\/+/ -> slashes', ["//", "."], ["a", ""]),
        (
            'start: "*** \\"q\\"\\n" /(.*)/ LF\n%import common.LF',
            ['*** "q"\nabc\n'],
            ['*** "q"\na\nb\n'],
        ),
    ],
)
def test_lark_as_one_expression(definition: str, matches: list[str], others: list[str]) -> None:
    (tool,) = as_functions([custom("lark", definition)])
    pattern = re.sub(
        r"\\x\{(\w+)\}", lambda found: chr(int(found[1], 16)), tool["function"]["text_pattern"]
    )
    assert [text for text in matches if not re.fullmatch(pattern, text)] == []
    assert [text for text in others if re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ('start: "(" start? ")"', "contains itself"),
        ("start: A\n%declare A", "it has %declare"),
        (
            "start: a a\n"
            + "\n".join(f"{x}: {f'{y} ' * 20}" for x, y in zip("abc", "bcd", strict=True))
            + '\nd: "123"',
            "is too large",
        ),
        ("start: " + "(" * 99 + '"a"' + ")" * 99, "nested too deeply"),
        ('start: "a"\n%import python.NAME', "imports from other libraries"),
    ],
)
def test_other_grammars_are_not_enforced(definition: str, reason: str) -> None:
    chosen = tool_choice(as_functions([custom("lark", definition)]), "auto")
    kept, (broken,) = enforceable(chosen, CALLS["hermes"])
    assert reason in broken and not kept.has_strict


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ({"type": "xml"}, "format"),
        ({"type": "grammar"}, "format"),
        ({"type": "grammar", "syntax": "ebnf", "definition": "a"}, "format.syntax"),
        ({"type": "grammar", "syntax": "regex", "definition": ""}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "x" * 16385}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": 'a: "b"'}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: b"}, "format.definition"),
        (
            {"type": "grammar", "syntax": "lark", "definition": "start: A\n%import common.A"},
            "format.definition",
        ),
        ({"type": "grammar", "syntax": "lark", "definition": "start: ("}, "format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": 'start: "a'}, "format.definition"),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start b"}},
            "format.grammar.definition",
        ),
    ],
    ids=str,
)
def test_wrong_formats_are_named(format: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        as_functions([{"type": "custom", "custom": {"name": "a", "format": format}}])
    assert caught.value.param == f"tools[0].custom.{param}"
    assert caught.value.param in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b\\u00e4\\\\"}', 'a\n"bä\\'),
        (' { "input" : "a" , "more": 1}', "a"),
        ('{"input": ""}', ""),
        ('{"input": "a\\nb', "a\nb"),  # cut off
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a?"),
        ('{"input": "a\tb"}', "a\tb"),
        ('{"input": 1}', '{"input": 1}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("{}", "{}"),
        ("no JSON", "no JSON"),
    ],
)
def test_the_text_of_a_call(arguments: str, text: str) -> None:
    assert input_of(arguments) == text


def test_all_grammars_together_are_bounded() -> None:
    """Reading them takes time, which no other request has during it."""
    tools = [custom("regex", "a" * 16384) for _ in range(4)]
    assert len(as_functions(tools)) == 4
    with pytest.raises(ApiError, match="tools have grammars of more than 65536 bytes"):
        as_functions([*tools, custom("regex", "a")])
    body = [{"type": "custom", "name": f"a{n}", **_flat(one)} for n, one in enumerate(tools)]
    with pytest.raises(ApiError, match="tools have grammars"):
        chat_tools([{"type": "namespace", "name": "a", "tools": [*body, {**body[0], "name": "b"}]}])


def _flat(tool: Any) -> Any:
    grammar = tool["custom"]["format"]["grammar"]
    return {"format": {"type": "grammar", **grammar}}
