"""Sampling parameters: vLLM's forms are accepted, nonsense is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.request import SamplingParams

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
    "seed a string": ({"seed": "7"}, "seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    values, message = REFUSED[name]
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)


def test_vllm_s_forms() -> None:
    params = SamplingParams(
        stop="end", stop_token_ids=[5], top_k=-1, logit_bias={"7": 2}, max_tokens=None
    )  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (5,)
    assert params.top_k == 0
    assert params.logit_bias == {7: 2.0}
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


def test_defaults_are_vllm_s() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert not params.greedy and not params.has_penalties
    assert SamplingParams(temperature=0).greedy
