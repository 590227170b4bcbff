"""Bodies of requests: invalid JSON, and each field that is invalid, unknown or not supported."""

import json
import time

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from jaxinfer.server.api.parse import MAX_LOCATED_CHARACTERS, parse
from jaxinfer.server.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from kit.request_bodies import CHAT, KINDS, PROMPT, minimal, read, refusal

# bodies


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param(b"", None, id="empty"),
        pytest.param(b'{"prompt": "a"', None, id="cut"),
        pytest.param(b'{"prompt": "a",}', None, id="trailing comma"),
        pytest.param(b'{"prompt": "a"} x', None, id="trailing text"),
        pytest.param(b"prompt=a", None, id="a form"),
        pytest.param(b"[]", None, id="a list"),
        pytest.param(b"null", None, id="null"),
        pytest.param(b'"text"', None, id="a string"),
        pytest.param(b"\xff\xfe", None, id="not UTF-8"),
        pytest.param(b'{"prompt": "\xff"}', None, id="not UTF-8 in a string"),
        pytest.param(b"[" * 100_000, None, id="deep"),
        pytest.param(b'{"prompt":' * 100_000, None, id="deep objects"),
        pytest.param(b'{"prompt": "a", "temperature": NaN}', "temperature", id="NaN"),
        pytest.param(b'{"prompt": "a", "top_p": -Infinity}', "top_p", id="-Infinity"),
        pytest.param(b'{"prompt": "a", "min_p": 1e999}', "min_p", id="1e999"),
        pytest.param(b'{"prompt": ["a", "\\ud800"]}', "prompt[1]", id="half a surrogate pair"),
        pytest.param(b'{"prompt": "a", "x": {"y": [1, NaN]}}', "x.y[1]", id="NaN within"),
        pytest.param(b'{"prompt": "a", "\\udfff": 1}', None, id="half a pair as a name"),
        pytest.param(b'{"n": ' + b"9" * 5000 + b"}", None, id="5000 digits"),
    ],
)
def test_bodies_that_are_no_request(body, param):
    assert refusal(body).param == param


NAN_FAR_IN = b'{"x": [' + b"1," * MAX_LOCATED_CHARACTERS + b"NaN]}"
NAN_DEEP = b'{"x":' + b"[" * 900 + b"0," * 30_000 + b"NaN" + b"]" * 900 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({**PROMPT, "stop": ["abc"] * 10_000}, id="10000 stop strings"),
        pytest.param({"prompt": ["a"] * 1_000_000}, id="1000000 prompts"),
        pytest.param({"prompt": [1] * 1_000_000 + [-1]}, id="1000000 ids"),
        pytest.param({**PROMPT, "stop": "a" * 8_000_000}, id="8 MB stop string"),
        pytest.param({**PROMPT, "logit_bias": {str(i): 1 for i in range(200_000)}}, id="biases"),
        pytest.param({f"{i}": 1 for i in range(300_000)}, id="300000 names"),
        pytest.param(NAN_FAR_IN, id="NaN far in"),
        pytest.param(NAN_DEEP, id="NaN deep in"),
        pytest.param(b'{"' + b"x" * 60_000 + b'": [' + b"1," * 30_000 + b"NaN]}", id="long name"),
    ],
)
def test_bounded_time(body):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    began = time.process_time()
    refusal(raw)
    assert time.process_time() - began < 3  # under 0.4 s on an idle machine


# fields


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, [1]]}, "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 16384}, "n"),
        ({"model": 1}, "model"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2**64}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": []}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": [None]}, "stop[0]"),
        ({"stop": ["a", "b", ""]}, "stop[2]"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 65537}, "stop"),
        ({"stop_token_ids": 1}, "stop_token_ids"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(513)}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        ({"ignore_eos": "true"}, "ignore_eos"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"cache_salt": "a" * 1025}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\r\nb"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"timeout": 0}, "timeout"),
        ({"best_of": 3}, "best_of"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_wrong_fields(field, param):
    error = refusal({**PROMPT, **field})
    assert error.param == param
    assert param.partition("[")[0].partition(".")[0] in error.message


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {}, "prompt"),
        (GenerateRequest, {"prompt": ["a"]}, "prompt[0]"),
        (GenerateRequest, {"prompt": []}, "prompt"),
        (GenerateRequest, {**PROMPT, "max_tokens": 0}, "max_tokens"),
        (ChatCompletionRequest, {}, "messages"),
        (ChatCompletionRequest, {"messages": []}, "messages"),
        (ChatCompletionRequest, {"messages": "hi"}, "messages"),
        (ChatCompletionRequest, {"messages": [1]}, "messages[0]"),
        (ChatCompletionRequest, {**CHAT, "max_tokens": 0}, "max_tokens"),
        (ChatCompletionRequest, {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        (ChatCompletionRequest, {**CHAT, "logprobs": 5}, "logprobs"),
        (ChatCompletionRequest, {**CHAT, "top_logprobs": 5}, "top_logprobs"),
        (ChatCompletionRequest, {**CHAT, "top_logprobs": 21}, "top_logprobs"),
        (ChatCompletionRequest, {**CHAT, "chat_template_kwargs": []}, "chat_template_kwargs"),
        (TokenizeRequest, {}, "prompt"),
        (TokenizeRequest, {**PROMPT, **CHAT}, "prompt"),
        (TokenizeRequest, {**CHAT, "tools": [{}]}, "tools[0].function"),
        (DetokenizeRequest, {}, "tokens"),
        (DetokenizeRequest, {"tokens": [1, "a"]}, "tokens[1]"),
        (DetokenizeRequest, {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_wrong_fields_of_other_requests(kind, body, param):
    assert refusal(body, kind).param == param


@pytest.mark.parametrize("name", ["messages", "chat_template_kwargs"])
def test_deep_values_never_reach_the_template(name):
    deep = json.loads("[" * 100 + "]" * 100)
    value = {"x": deep} if name == "chat_template_kwargs" else [{"role": "user", "content": deep}]
    assert refusal({**CHAT, name: value}, ChatCompletionRequest).param == name


def test_messages_are_plain():
    error = refusal({**PROMPT, "max_tokens": "many"})
    assert error.message == "max_tokens must be an integer, got a string"
    error = refusal({**PROMPT, "n": 0})
    assert error.message == "n must be at least 1, got 0"
    error = refusal({**PROMPT, "stop": ["a"] * 10_000})
    assert error.message == "stop must have at most 64 items, got 10000"


# null, unknown, unsupported


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_the_default(kind):
    body = minimal(kind)
    required = set(body)
    names = set(kind.__struct_fields__) | set(kind.unsupported) | set(kind.ignored)
    nulls = dict.fromkeys(names - required)
    assert read({**body, **nulls}, kind) == read(body, kind)


@pytest.mark.parametrize("kind", [*KINDS, TokenizeRequest, DetokenizeRequest])
def test_unsupported_fields(kind):
    body = {"tokens": [1]} if kind is DetokenizeRequest else minimal(kind)
    for name, neutral in kind.unsupported.items():
        for value in neutral:
            assert parse(json.dumps({**body, name: value}).encode(), kind).unknown == ()
        error = refusal({**body, name: {"some": "thing"}}, kind)
        assert (error.param, error.message) == (name, f"{name} is not supported; leave it out")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("service_tier", "flex"),
        ("store", True),
        ("store", 0),  # not equal to false
        ("logits_processors", ["a"]),
    ],
)
def test_unsupported_values(name, value):
    assert refusal({**CHAT, name: value}, ChatCompletionRequest).param == name


def test_every_parameter_of_openai_is_known():
    for kind, params in (
        (CompletionRequest, completion_params),
        (ChatCompletionRequest, chat_params),
    ):
        known = {*kind.__struct_fields__, *kind.unsupported, *kind.ignored}
        assert set(params.CompletionCreateParamsBase.__annotations__) - known == set()


def test_whole_numbers_with_a_point():
    """In JSON Schema, and so in clients generated from it, 2.0 is an integer."""
    given = {"prompt": [[1.0, 2]], "max_tokens": 4.0, "stop_token_ids": [1, 2.0], "top_p": 1}
    request = read(given)
    assert (request.prompts, request.max_tokens, request.stop_token_ids) == ([(1, 2)], 4, (1, 2))
    names = {"chat_template_kwargs": {"x": 1.0}}
    kept = read({**CHAT, **names}, ChatCompletionRequest).chat_template_kwargs
    assert repr(kept) == "{'x': 1.0}"  # a template may print it


def test_unknown_fields():
    body = json.dumps({**PROMPT, "zebra": 1, "x" * 100: 2, "gone": None}).encode()
    parsed = parse(body, CompletionRequest)
    assert parsed.unknown == ("x" * 64, "zebra")
    error = refusal({**PROMPT, "zebra": 1, "ant": 2}, strict=True)
    assert error.param == "ant"
    assert error.message == "unknown fields: ant, zebra; leave them out"
    many = json.dumps({**PROMPT, **{f"x{i}": 1 for i in range(1000)}}).encode()
    assert len(parse(many, CompletionRequest).unknown) == 16


def test_unknown_fields_within_stream_options():
    options = {"include_usage": True, "include_obfuscation": False, "ant": 1, "gone": None}
    body = {**PROMPT, "stream": True, "stream_options": options}
    assert parse(json.dumps(body).encode(), CompletionRequest).unknown == ("stream_options.ant",)
    assert refusal(body, strict=True).param == "stream_options.ant"
