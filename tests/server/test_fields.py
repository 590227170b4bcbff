"""The meaning of a request's fields: prompts, SamplingParams and their bounds, usage."""

import math
from typing import get_args, get_type_hints

import msgspec
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams
from jaxinfer.server.api.fields import to_sampling
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest
from kit.request_bodies import CHAT, KINDS, PROMPT, minimal, read, refusal


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
    and not name.endswith("token_ids")
    and name not in ("truncate_prompt_tokens", "best_of")
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
