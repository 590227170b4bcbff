"""Answers follow their form, whatever else happens in the engine."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxinfer.core.errors import EngineError, RequestError
from jaxinfer.core.request import FinishReason, RequestSpec, SamplingParams
from jaxinfer.core.structured import Thinking
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.outputs import Delta
from kit.engines import EOS, run, tiny_engine, tiny_limits, tokens
from kit.schemas import schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPTS = ([72, 105, 33], [9, 8, 7, 6], [40, 41, 42, 43, 44], [77] * 9, [1, 2], [3] * 20)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=100)


def structured(form: dict[str, Any], **others: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "seed": 5, "max_tokens": 100, "structured_outputs": form, **others}
    )


JSON = structured({"json": PERSON, "disable_any_whitespace": True})


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(tiny_limits())


def texts(engine: Engine, sampling: SamplingParams, prompts: Sequence[Any] = PROMPTS) -> list[str]:
    """The answers, all of which must have ended by themselves. The model likes to repeat itself."""
    sampling = replace(sampling, frequency_penalty=1.0)
    outputs = [one for output in run(engine, prompts, sampling) for one in output.outputs]
    assert {one.finish_reason for one in outputs} == {"stop"}, [one.text for one in outputs]
    return [one.text for one in outputs]


TAG = {"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "[0-9]{3}-(ab|c){1,4}"}, r"[0-9]{3}-(ab|c){1,4}"),
    "choice": ({"choice": ["yes", "no", 'é "quoted"']}, r'yes|no|é "quoted"'),
    "Lark": ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{1,3}/'}, r"a[0-9]{1,3}"),
    "GBNF": ({"grammar": 'root ::= "x" [0-9] [a-c]* "!"'}, r"x[0-9][a-c]*!"),
    "sequence": (
        {
            "structural_tag": {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "> "},
                        {"type": "json_schema", "json_schema": {"enum": [7, 8]}},
                    ],
                }
            }
        },
        r"> (7|8)",
    ),
    "tags": (
        {
            "structural_tag": {
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "at_least_one": True,
                    "tags": [
                        {"begin": "<f>", "content": {"type": "regex", "pattern": "a|b"}, "end": ">"}
                    ],
                }
            }
        },
        r"<f>(a|b)>(, <f>(a|b)>)*",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_kind_of_form(engine: Engine, name: str) -> None:
    form, pattern = FORMS[name]
    for text in texts(engine, structured(form)):
        assert re.fullmatch(pattern, text), text


def test_text_with_a_triggered_tag(engine: Engine) -> None:
    form = {"structural_tag": {"structures": [TAG], "triggers": ["<f"]}}
    bias = {ord("<"): 4.0, ord("f"): 2.0, EOS: 5.0}  # so that the random model writes tags and ends
    for text in texts(engine, structured(form, logit_bias=bias)):
        assert re.fullmatch(r"((?!<f).)*(<f>(1|2)</f>((?!<f).)*)*", text, re.DOTALL), text


@pytest.mark.parametrize("name", ["json", "json_object"])
def test_json(engine: Engine, name: str) -> None:
    form = {"json": PERSON} if name == "json" else {"json_object": True}
    bias = {ord("}"): 9.0, ord('"'): 5.0}  # so that the random model ends texts and objects
    form["disable_any_whitespace"] = True
    for text in texts(engine, structured(form, logit_bias=bias)):
        assert isinstance(json.loads(text), dict)
        if name == "json":
            jsonschema_rs.validate(PERSON, json.loads(text))


def check_answers(engine: Engine, some: Sequence[dict[str, Any]], seed: int) -> None:
    """Every answer that ended by itself is valid; one that did not is a beginning of JSON."""
    forms = [
        structured({"json": schema, "disable_any_whitespace": i % 2 == 0}, seed=seed + i)
        for i, schema in enumerate(some)
    ]
    prompts = [list(PROMPTS[i % len(PROMPTS)]) for i in range(len(some))]
    for output, schema in zip(run(engine, prompts, forms), some, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason == "stop":
            jsonschema_rs.validate(schema, json.loads(answer.text))
        else:
            assert answer.finish_reason == "length"


BATCHES = st.lists(schemas(), min_size=6, max_size=6)


@given(BATCHES, st.integers(0, 2**31))
@settings(max_examples=5)
def test_answers_to_random_schemas_are_valid(
    engine: Engine, some: list[dict[str, Any]], seed: int
) -> None:
    check_answers(engine, some, seed)


@pytest.mark.nightly
@given(BATCHES, st.integers(0, 2**31))
@settings(max_examples=350)  # of six schemas each
def test_answers_to_2000_random_schemas_are_valid(
    engine: Engine, some: list[dict[str, Any]], seed: int
) -> None:
    check_answers(engine, some, seed)


# What may happen around a constrained request, none of which changes its tokens.
VARIANTS = {
    "batched": tiny_limits(enable_prefix_caching=False),
    "prefix reuse": tiny_limits(),
    "chunks of 16": tiny_limits(max_num_batched_tokens=16),
    "preemption": tiny_limits(num_pages=34),
    "one slot": tiny_limits(max_num_seqs=1),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"top_p": 0.9},
    "with extras": {"logprobs": 2, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "n and min_tokens": {"n": 2, "min_tokens": 90},
    "ignoring eos": {"ignore_eos": True, "logit_bias": {40: -5.0}},
}


def mixed(prompts: Sequence[Any], options: dict[str, Any]) -> list[SamplingParams]:
    """Two of three requests are constrained."""
    plain = replace(SEEDED, max_tokens=40)
    return [plain if i % 3 == 2 else replace(JSON, **options) for i in range(len(prompts))]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[list[int]]]]:
    """The reference: one request at a time, without overlap or prefix reuse."""
    engine = tiny_engine(tiny_limits(enable_prefix_caching=False), overlap=False)
    return {
        name: tokens(run(engine, PROMPTS, mixed(PROMPTS, options), together=False))
        for name, options in OPTIONS.items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_tokens_as_alone(alone: dict[str, list[list[list[int]]]], variant: str) -> None:
    engine = tiny_engine(VARIANTS[variant])
    for name, options in OPTIONS.items():
        outputs = run(engine, PROMPTS, mixed(PROMPTS, options))
        assert tokens(outputs) == alone[name], name
        for number, output in enumerate(outputs):
            for one in output.outputs:
                if number % 3 != 2 and one.finish_reason == "stop":
                    jsonschema_rs.validate(PERSON, json.loads(one.text))
                    assert one.token_ids[-1] == EOS or one.token_ids.count(EOS) == 0
    stats = engine.stats()
    assert stats.num_late_compiles == 0
    assert (stats.num_preemptions > 0) == (variant == "preemption")


def test_a_complete_answer_ends_before_min_tokens(engine: Engine) -> None:
    answers = texts(engine, structured({"choice": ["ab", "cd"]}, min_tokens=50))
    assert set(answers) <= {"ab", "cd"}


def test_ignore_eos_prefers_to_go_on(engine: Engine) -> None:
    form = {"regex": "a{1,30}"}
    answers = texts(engine, structured(form, ignore_eos=True))
    assert set(answers) == {"a" * 30}
    assert min(map(len, texts(engine, structured(form, logit_bias={EOS: 5.0})))) < 30


def test_a_stop_string_ends_an_answer_in_its_middle(engine: Engine) -> None:
    outputs = run(engine, PROMPTS, replace(JSON, stop=(', "tags"',), detokenize=True))
    for output in outputs:
        assert output.outputs[0].stop_reason == ', "tags"' or '"tags"' in output.outputs[0].text


def test_logprobs_are_of_the_whole_vocabulary(engine: Engine) -> None:
    (output,) = run(engine, PROMPTS[:1], structured({"choice": ["zzz"]}, logprobs=1))
    first = output.outputs[0].logprobs
    assert first is not None
    assert {len(position) for position in first} == {2}  # the drawn token is not the likeliest


def test_logprobs_of_named_tokens(engine: Engine) -> None:
    """They are those that many of the likeliest tokens would have, with or without a form."""
    many = replace(SEEDED, logprobs=20, max_tokens=4)
    ((every,), (some,)) = (
        run(engine, PROMPTS[:1], params)[0].outputs
        for params in (many, replace(many, logprobs=None, logprob_token_ids=(7, 300)))
    )
    assert every.token_ids == some.token_ids and every.logprobs and some.logprobs
    for whole, named in zip(every.logprobs, some.logprobs, strict=True):
        assert {7, 300} <= named.keys() and len(named) <= 3
        for token_id, one in named.items():
            if token_id in whole:
                assert one.logprob == pytest.approx(whole[token_id].logprob, abs=1e-5)
            else:
                assert one.logprob <= min(other.logprob for other in whole.values())
    with pytest.raises(RequestError, match="logprob_token_ids holds token id 320"):
        engine.add_request("x", RequestSpec([1], SamplingParams(logprob_token_ids=(320,))))


def test_a_form_may_begin_after_other_tokens(engine: Engine) -> None:
    thinking = Thinking(end=(10, 10), is_open=True)
    form = structured(
        {"choice": ["yes", "no"]}, logit_bias={10: 14.0, EOS: 30.0}, thinking=thinking
    )
    answers = texts(engine, form)
    for text in answers:
        assert re.fullmatch(r"(?:(?!\n\n).)*\n\n(yes|no)", text, re.DOTALL), text


def test_the_budget_of_thoughts(engine: Engine) -> None:
    """On the device: the marks are forced after as many tokens; then the answer goes on."""
    for budget in (0, 1, 6):
        thinking = Thinking(end=(60, 61), is_open=True, budget=budget)
        sampling = replace(SEEDED, thinking=thinking, max_tokens=12, ignore_eos=True, seed=budget)
        for output in run(engine, PROMPTS, sampling):
            ids = output.outputs[0].token_ids
            assert ids[budget : budget + 2] == [60, 61] and len(ids) == 12, ids


def test_only_allowed_tokens(engine: Engine) -> None:
    allowed = [97, 98, EOS]
    sampling = replace(SEEDED, allowed_token_ids=allowed, max_tokens=20)
    for output in run(engine, PROMPTS, sampling):
        assert set(output.outputs[0].token_ids) <= set(allowed)
    with pytest.raises(RequestError, match="allowed_token_ids holds token id 320"):
        engine.add_request("x", RequestSpec([1], SamplingParams(allowed_token_ids=(320,))))


def test_no_bad_word(engine: Engine) -> None:
    plain = replace(SEEDED, allowed_token_ids=[97, 98, 99], max_tokens=60, ignore_eos=True)
    answers = [output.outputs[0].text for output in run(engine, PROMPTS, plain)]
    assert any("ab" in text for text in answers) and any("c" in text for text in answers)
    sampling = replace(plain, bad_words=["ab", "c"])
    for output in run(engine, PROMPTS, sampling):
        text = output.outputs[0].text
        assert "ab" not in text and "c" not in text and len(text) == 60


def test_a_filter_is_freed_when_its_request_ends(engine: Engine) -> None:
    filters: list[weakref.ref[Failing]] = []

    class Followed(Failing):
        def begin(self, drawn: Sequence[int]) -> Failing:
            begun = super().begin(drawn)
            filters.append(weakref.ref(begun))
            return begun

    for name, max_tokens in (("short", 3), ("aborted", 50)):
        sampling = SamplingParams(allowed_token_ids=(97,), max_tokens=max_tokens)
        engine.add_request(name, RequestSpec([1], sampling), constraint=Followed(99, ""))
    while engine.has_work and engine.stats().num_running != 1:
        engine.step()
    gc.collect()
    short, aborted = filters
    assert short() is None and aborted() is not None
    engine.abort("aborted")
    while engine.has_work:
        engine.step()
    gc.collect()
    assert aborted() is None


class Failing:
    """A constraint whose masks fail from the given token on."""

    def __init__(self, last: int, where: str) -> None:
        self.last, self.where, self.count = last, where, 0

    def begin(self, drawn: Sequence[int]) -> Failing:
        if self.where == "begin":
            raise ValueError("it broke")
        return Failing(self.last, self.where)

    def push(self, token_id: int) -> None:
        self.count += 1
        if self.where == "push" and self.count == self.last:
            raise ValueError("it broke")

    def fill(self, mask: np.ndarray) -> None:
        if self.where == "fill" and self.count == self.last:
            raise ValueError("it broke")
        mask[:] = 0
        mask[3] = 2  # only token 97


@pytest.mark.parametrize("where", ["begin", "push", "fill"])
def test_a_failing_constraint_ends_its_own_request(engine: Engine, where: str) -> None:
    plain = replace(SEEDED, max_tokens=12, ignore_eos=True)
    (before,) = tokens(run(engine, PROMPTS[:1], plain))
    engine.add_request("plain", RequestSpec(PROMPTS[0], plain))
    sampling = replace(plain, allowed_token_ids=(97,))
    engine.add_request("broken", RequestSpec(PROMPTS[1], sampling), constraint=Failing(3, where))
    deltas: dict[str, list[Delta]] = {"plain": [], "broken": []}
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas[delta.request_id].append(delta)
    last = deltas["broken"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "the answer's constraint cannot be continued: it broke"
    assert isinstance(last.failure(), EngineError)
    drawn = [token for delta in deltas["broken"] for token in delta.token_ids]
    assert drawn == [97] * {"begin": 0, "push": 2, "fill": 3}[where]
    assert [token for delta in deltas["plain"] for token in delta.token_ids] == before[0]


def test_a_grammar_beyond_the_bounds_ends_its_own_request(engine: Engine) -> None:
    """Where the trial has not found it."""
    exploding = "[b-f]{80}" + "(" * 8 + "a" + "{0,9})" * 8
    engine.add_request("x", RequestSpec([1], structured({"regex": exploding}, ignore_eos=True)))
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step().deltas
    failure = deltas[-1].failure("prompt 0: ")
    assert isinstance(failure, RequestError)
    assert str(failure).startswith("prompt 0: structured_outputs cannot be followed to the end: ")


def test_without_a_tokenizer_a_form_is_refused() -> None:
    engine = tiny_engine(tokenizer=False)
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer"):
        engine.add_request("x", RequestSpec([1], JSON))
