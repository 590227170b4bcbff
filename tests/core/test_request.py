"""Sampling parameters: vLLM's forms are accepted; an error names the invalid field."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import RequestSpec, SamplingParams

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature NaN": ({"temperature": math.nan}, "temperature must be a number"),
    "temperature infinite": ({"temperature": math.inf}, "temperature must be a number"),
    "temperature negative": ({"temperature": -0.1}, "temperature"),
    "temperature a string": ({"temperature": "hot"}, "temperature"),
    "max_tokens 0": ({"max_tokens": 0}, r"max_tokens must be a number in \[1,"),
    "max_tokens negative": ({"max_tokens": -5}, "max_tokens"),
    "max_tokens a bool": ({"max_tokens": True}, "max_tokens"),
    "max_tokens a fraction": ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
    "min above max": ({"max_tokens": 4, "min_tokens": 5}, "min_tokens 5 is larger"),
    "top_p 0": ({"top_p": 0.0}, "top_p"),
    "top_p above 1": ({"top_p": 1.01}, "top_p"),
    "top_k below -1": ({"top_k": -2}, "top_k"),
    "min_p above 1": ({"min_p": 1.5}, "min_p"),
    "presence out of range": ({"presence_penalty": 2.1}, "presence_penalty"),
    "frequency out of range": ({"frequency_penalty": -2.1}, "frequency_penalty"),
    "repetition 0": ({"repetition_penalty": 0.0}, "repetition_penalty"),
    "temperature beyond float32": ({"temperature": 1e39}, "temperature"),
    "repetition beyond float32": ({"repetition_penalty": 1e39}, "repetition_penalty"),
    "repetition next to 0": ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    "n 0": ({"n": 0}, "n must be"),
    "logprobs above 20": ({"logprobs": 21}, "logprobs"),
    "prompt_logprobs negative": ({"prompt_logprobs": -1}, "prompt_logprobs"),
    "empty stop string": ({"stop": ["a", ""]}, "stop must hold non-empty strings"),
    "stop without text": ({"stop": "a", "detokenize": False}, "stop strings need detokenize"),
    "stop id negative": ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
    "too many stop ids": ({"stop_token_ids": range(65)}, "holds 65 ids"),
    "bias beyond 100": ({"logit_bias": {1: 101.0}}, r"logit_bias\[1\]"),
    "bias of no id": ({"logit_bias": {"x": 1.0}}, "token ids are integers"),
    "too many biases": ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "holds 513 entries"),
    "seed a string": ({"seed": "7"}, "seed must be a whole number"),
    "n None": ({"n": None}, "n must be a whole number"),
    "temperature beyond floats": ({"temperature": 10**400}, "temperature must be a number"),
    "flag a string": ({"ignore_eos": "no"}, "ignore_eos must be True or False"),
    "stop a number": ({"stop": 5}, "stop must be a list, got 5"),
    "stop a dict": ({"stop": {"a": 1}}, "stop must be a list"),
    "stop of numbers": ({"stop": [1]}, "stop must hold non-empty strings, got 1"),
    "stop bytes": ({"stop": b"ab"}, "stop must be a list"),
    "stop too long": ({"stop": ["a" * 40000] * 2}, "stop holds 80000 characters in all"),
    "stop ids a number": ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
    "stop ids a string": ({"stop_token_ids": "55"}, "stop_token_ids must be a list"),
    "stop id a string": ({"stop_token_ids": ["5"]}, "stop_token_ids holds '5'; token ids are"),
    "stop id a fraction": ({"stop_token_ids": [1.5]}, "stop_token_ids holds 1.5"),
    "stop id a bool": ({"stop_token_ids": [True]}, "stop_token_ids holds True"),
    "stop id huge": ({"stop_token_ids": [2**31]}, "stop_token_ids holds 2147483648"),
    "biases a list": ({"logit_bias": [1]}, r"logit_bias must map token ids to numbers, got \[1\]"),
    "bias a string": ({"logit_bias": {1: "x"}}, r"logit_bias\[1\] must be a number"),
    "bias NaN": ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] must be a number"),
    "bias key a fraction": ({"logit_bias": {1.9: 2}}, "logit_bias holds 1.9"),
    "bias key signed": ({"logit_bias": {"-1": 2}}, "logit_bias holds '-1'"),
    "bias key endless": ({"logit_bias": {"9" * 5000: 2}}, "logit_bias holds '9999"),
    "several beams": ({"best_of": 4}, "best_of=4 is not supported; leave best_of out"),
    "empty bad word": ({"bad_words": ["x", " "]}, "bad_words must hold texts"),
    "too many bad words": ({"bad_words": ["x"] * 257}, "bad_words holds 257 words"),
    "no allowed ids": ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    "structured outputs of nothing": ({"structured_outputs": object()}, "needs exactly one of"),
    "two forms": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice are"),
    "unknown form": ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn is unknown"),
    "empty choice": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice must hold"),
    "large schema": (
        {"structured_outputs": {"json": {"const": "x" * 262144}}},
        "structured_outputs.json has 262157 bytes; at most 262144",
    ),
    "both names": (
        {"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}},
        "guided_decoding is set next to structured_outputs",
    ),
    "output kind": ({"output_kind": 2}, "output_kind"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    values, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_forms_of_vllm_are_accepted() -> None:
    params = SamplingParams(
        stop="end", stop_token_ids=[5], top_k=-1, logit_bias={"7": 2}, max_tokens=None
    )  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (5,)
    assert params.top_k == 0
    assert params.logit_bias == {7: 2.0}
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


def test_numpy_numbers_are_stored_as_python_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int32(7): np.float32(1)},  # type: ignore[arg-type]
    )
    values = (params.max_tokens, params.temperature, *params.stop_token_ids)
    assert values == (5, 0.5, 3, 4) and params.logit_bias == {7: 1.0}
    assert {type(value) for value in values} == {int, float}


def test_neutral_values_of_unsupported_fields_are_accepted() -> None:
    params = SamplingParams(
        temperature=0.5,
        best_of=1,
        bad_words=[],
        allowed_token_ids=None,
        logits_processors=None,
        guided_decoding=None,
        structured_outputs=None,
        truncate_prompt_tokens=None,
        output_kind=None,
        extra_args=None,
        spaces_between_special_tokens=True,
        flat_logprobs=False,
        skip_clone=True,
        skip_reading_prefix_cache=None,
    )
    assert "temperature=0.5" in repr(params)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_priority_and_cache_salt() -> None:
    spec = RequestSpec((1,), SamplingParams(), cast("Any", np.int32(-3)), "tenant é")
    assert (spec.priority, type(spec.priority), spec.cache_salt) == (-3, int, "tenant é")


@pytest.mark.parametrize(
    ("priority", "salt", "message"),
    [
        (1.5, "", "priority must be a whole number"),
        (True, "", "priority must be a whole number"),
        (2**31, "", "priority must be a number in"),
        (0, 5, "cache_salt must be text, got 5"),
        (0, "\ud800", "cache_salt .* has no UTF-8 form"),
    ],
)
def test_invalid_priority_or_cache_salt(priority: Any, salt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        RequestSpec((1,), SamplingParams(), priority, salt)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert not params.greedy and not params.has_penalties
    assert SamplingParams(temperature=0).greedy
