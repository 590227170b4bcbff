"""Bodies to requests to SamplingParams, and the errors that name what is wrong."""

import json
import math
import time
from typing import get_args, get_type_hints

import msgspec
import openai.types as openai_types
import openai.types.chat as openai_chat
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from jaxinfer.core.errors import EngineError, RequestError, TokenizerError
from jaxinfer.core.request import FinishReason, SamplingParams
from jaxinfer.engine.outputs import Logprob
from jaxinfer.server import responses
from jaxinfer.server.errors import ApiError, api_error
from jaxinfer.server.fields import to_sampling
from jaxinfer.server.parse import MAX_LOCATED_CHARACTERS, parse
from jaxinfer.server.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)

PROMPT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
KINDS = (CompletionRequest, ChatCompletionRequest, GenerateRequest)


def minimal(kind):
    return CHAT if kind is ChatCompletionRequest else PROMPT


def read(body, kind=CompletionRequest, **options):
    return parse(json.dumps(body).encode(), kind, **options).request


def refusal(body, kind=CompletionRequest, **options) -> ApiError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw, kind, **options)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert "$" not in error.message and "`" not in error.message  # msgspec's own words
    assert len(error.message) < 300
    return error


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
    began = time.perf_counter()
    refusal(raw)
    assert time.perf_counter() - began < 3  # under 0.4 s on an idle machine


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
        (TokenizeRequest, {**CHAT, "tools": [{}]}, "tools"),
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
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
        ("service_tier", "flex"),
        ("store", True),
        ("store", 0),  # is not false
        ("use_beam_search", True),
        ("reasoning_effort", "high"),
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
    """To JSON Schema, and so to clients made from it, 2.0 is an integer."""
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


# meaning


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_forms_of_a_prompt(prompt, prompts):
    assert read({"prompt": prompt}).prompts == prompts


DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)


@pytest.mark.parametrize("kind", KINDS)
def test_model_defaults(kind):
    sampling = to_sampling(read(minimal(kind), kind), DEFAULTS)
    assert sampling.max_tokens == (None if kind is ChatCompletionRequest else 16)
    assert msgspec.structs.replace(sampling, max_tokens=16) == DEFAULTS
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    sampling = to_sampling(read({**minimal(kind), **given}, kind), DEFAULTS)
    assert msgspec.structs.replace(sampling, max_tokens=16) == SamplingParams()


def test_every_shared_field_arrives():
    given = {
        **{"n": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 7},
        **{"logit_bias": {"5": 1.5}, "min_tokens": 2, "max_tokens": 9, "prompt_logprobs": 1},
        **{"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.3},
        **{"stop": ["x"], "stop_token_ids": [4], "include_stop_str_in_output": True},
        **{"ignore_eos": True, "skip_special_tokens": False},
    }
    wanted = SamplingParams(**{**given, "logit_bias": {5: 1.5}})
    for kind in KINDS:
        assert to_sampling(read({**minimal(kind), **given}, kind), DEFAULTS) == wanted


def test_logprobs_of_completions():
    sampling = to_sampling(read({**PROMPT, "logprobs": 3}), DEFAULTS)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (3, None)
    request = read({**PROMPT, "logprobs": 3, "echo": True, "max_tokens": 0})
    sampling = to_sampling(request, DEFAULTS)
    assert request.scores_only
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.max_tokens) == (3, 3, 1)


def test_logprobs_of_chats():
    def counts(**fields):
        return to_sampling(read({**CHAT, **fields}, ChatCompletionRequest), DEFAULTS).logprobs

    assert counts() is None
    assert counts(logprobs=False) is None
    assert counts(logprobs=True) == 0
    assert counts(logprobs=True, top_logprobs=4) == 4


def test_servers_own_bound_of_logprobs():
    request = read({**CHAT, "logprobs": True, "top_logprobs": 6}, ChatCompletionRequest)
    with pytest.raises(ApiError) as caught:
        to_sampling(request, DEFAULTS, max_logprobs=5)
    assert caught.value.param == "top_logprobs"


def test_newer_name_wins():
    both = {**CHAT, "max_tokens": 5, "max_completion_tokens": 6}
    assert to_sampling(read(both, ChatCompletionRequest), DEFAULTS).max_tokens == 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, (False, False)),
        ({}, (True, False)),
        ({"include_usage": None, "continuous_usage_stats": None}, (True, False)),
        ({"include_usage": False, "continuous_usage_stats": True}, (False, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
    ],
)
def test_usage_of_streams(options, expected):
    request = read({**PROMPT, "stream": True, "stream_options": options})
    assert (request.sends_usage, request.sends_continuous_usage) == expected


# bounds


def constraints(hint):
    """Every Meta within a type, outermost first."""
    found = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, msgspec.Meta)]
    inner = get_args(hint)[:1] if getattr(hint, "__metadata__", ()) else get_args(hint)
    return found + [meta for one in inner for meta in constraints(one)]


BOUNDED = [
    (kind, name)
    for kind in KINDS
    for name, hint in get_type_hints(kind, include_extras=True).items()
    if name in SamplingParams.__struct_fields__
    and any(meta.ge is not None or meta.gt is not None for meta in constraints(hint))
    and not any(meta.pattern for meta in constraints(hint))
    and name not in ("truncate_prompt_tokens", "stop_token_ids", "best_of")
]


@pytest.mark.parametrize(("kind", "name"), BOUNDED, ids=lambda one: getattr(one, "__name__", one))
def test_bounds_are_those_of_sampling_params(kind, name):
    """A value at a bound passes both, the next one beyond it neither."""
    hint = get_type_hints(kind, include_extras=True)[name]
    meta = next(m for m in constraints(hint) if m.ge is not None or m.gt is not None)
    is_whole = isinstance(meta.le, int) and isinstance(meta.ge, int)
    below, above = (
        (meta.ge - 1, meta.le + 1)
        if is_whole
        else (math.nextafter(meta.ge or 0.0, -math.inf), math.nextafter(meta.le, math.inf))
    )
    scoring = kind is CompletionRequest and name == "max_tokens"  # where 0 has a meaning
    inside = [bound for bound in (1 if scoring else meta.ge, meta.le) if bound is not None]
    outside = [meta.gt if meta.gt is not None else -1 if scoring else below, above]
    context = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
    for value in inside:
        body = {**minimal(kind), **context, name: value}
        assert getattr(to_sampling(read(body, kind), DEFAULTS), name) == max(
            value, 0 if name == "top_k" else value
        )
    for value in outside:
        assert refusal({**minimal(kind), **context, name: value}, kind).param == name
        with pytest.raises(RequestError):
            SamplingParams(**{name: value})


def test_bounds_were_found():
    assert len(BOUNDED) >= 3 * 11


# errors


@pytest.mark.parametrize(
    ("error", "alive", "status", "param"),
    [
        (RequestError("min_tokens 5 is larger than max_tokens 3"), True, 400, "min_tokens"),
        (RequestError("the prompt has 9 tokens"), True, 400, "prompt"),
        (RequestError("prompt[3]: the prompt is empty"), True, 400, "prompt[3]"),
        (RequestError("messages[0].content[1] must be"), True, 400, "messages[0].content[1]"),
        (RequestError("logit_bias[5] must be"), True, 400, "logit_bias[5]"),
        (RequestError("stop strings need a tokenizer"), True, 400, "stop"),
        (RequestError("something else is wrong"), True, 400, None),
        (TokenizerError("The chat template failed: no"), True, 400, None),
        (EngineError("the step failed"), True, 500, None),
        (EngineError("the engine has stopped"), False, 503, None),
    ],
)
def test_errors_of_the_lower_floors(error, alive, status, param):
    told = api_error(error, alive=alive)
    assert (told.status, told.param, told.message) == (status, param, str(error))
    body = json.loads(told.body)
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if status == 400 else "server_error")


# answers, read by the official client's own types


USAGE = responses.usage(3, 2, cached_tokens=1)
HEAD = {"id": "x", "created": 1, "model": "m", "system_fingerprint": "f"}
CHAT_LOGPROBS = responses.ChatLogprobs(
    content=[
        responses.TokenLogprob(
            token="a",
            logprob=-1.0,
            bytes=[97],
            top_logprobs=[responses.TopLogprob(token="a", logprob=-1.0, bytes=[97])],
        )
    ]
)
LOGPROBS = responses.CompletionLogprobs(
    text_offset=[0], token_logprobs=[-1.0], tokens=["a"], top_logprobs=[{"a": -1.0}]
)
COMPLETION = responses.Completion(
    **HEAD,
    choices=[
        responses.CompletionChoice(
            index=0, text="a", finish_reason=FinishReason.STOP, logprobs=LOGPROBS, stop_reason=5
        )
    ],
    usage=USAGE,
)
ANSWERS = [
    (COMPLETION, openai_types.Completion),
    (
        responses.CompletionChunk(
            **HEAD,
            choices=[
                responses.CompletionChunkChoice(index=0, text="", finish_reason=FinishReason.LENGTH)
            ],
            usage=None,
        ),
        openai_types.Completion,
    ),
    (responses.CompletionChunk(**HEAD, choices=[], usage=USAGE), openai_types.Completion),
    (
        responses.ChatCompletion(
            **HEAD,
            choices=[
                responses.ChatChoice(
                    index=0,
                    message=responses.ChatMessage(role="assistant", content="a"),
                    finish_reason=FinishReason.STOP,
                    logprobs=CHAT_LOGPROBS,
                )
            ],
            usage=USAGE,
        ),
        openai_chat.ChatCompletion,
    ),
    (
        responses.ChatChunk(
            **HEAD,
            choices=[
                responses.ChatChunkChoice(
                    index=0, delta=responses.ChatDelta(role="assistant", content="")
                )
            ],
        ),
        openai_chat.ChatCompletionChunk,
    ),
    (
        responses.ChatChunk(
            **HEAD,
            choices=[
                responses.ChatChunkChoice(
                    index=0,
                    delta=responses.ChatDelta(),
                    finish_reason=FinishReason.STOP,
                    stop_reason="x",
                    logprobs=CHAT_LOGPROBS,
                )
            ],
            usage=None,
        ),
        openai_chat.ChatCompletionChunk,
    ),
    (
        responses.ModelCard(id="m", created=1, root="m", max_model_len=9),
        openai_types.Model,
    ),
]


@pytest.mark.parametrize(("answer", "kind"), ANSWERS, ids=lambda one: type(one).__name__)
def test_official_types_read_our_answers(answer, kind):
    sent = json.loads(responses.encode(answer))
    read_back = kind.model_validate(sent, strict=True)
    assert read_back.model_dump(exclude_unset=True) == sent


def test_left_out_and_null_fields():
    chunk = responses.CompletionChunk(**HEAD, choices=[])
    assert "usage" not in json.loads(responses.encode(chunk))
    waiting = msgspec.structs.replace(chunk, usage=None)
    assert json.loads(responses.encode(waiting))["usage"] is None
    delta = responses.ChatDelta(content="a")
    assert json.loads(responses.encode(delta)) == {"content": "a"}


def test_prompt_logprobs_are_keyed_by_id():
    choice = msgspec.structs.replace(
        COMPLETION.choices[0], prompt_logprobs=[None, {7: Logprob(-1.0, 2, "b")}]
    )
    assert json.loads(responses.encode(choice))["prompt_logprobs"] == [
        None,
        {"7": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}},
    ]
