"""Sampling defaults and end-of-text ids from a model's config files."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.requests.facts import ModelFacts, facts_of_configs
from jaxinfer.server.api.fields import limit_max_tokens


def facts(
    generation_config: dict[str, Any],
    hf_config: dict[str, Any] | None = None,
    use_generation_config: bool = True,
) -> ModelFacts:
    return facts_of_configs(
        "m", 96, hf_config or {}, generation_config, use_generation_config=use_generation_config
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": 0, "min_p": 0}, {"top_k": 0, "min_p": 0.0}),
        ({"temperature": None, "top_p": 0.9}, {"top_p": 0.9}),
        ({"repetition_penalty": 1.05, "top_k": 20}, {"repetition_penalty": 1.05, "top_k": 20}),
        ({"min_p": 0.1, "max_new_tokens": 7}, {"min_p": 0.1, "max_tokens": 7}),
    ],
    ids=str,
)
def test_fields_that_are_used(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert facts(given).default_sampling == SamplingParams(**expected)
    assert facts(given, use_generation_config=False).default_sampling == SamplingParams()


def test_without_the_file_config_json_is_read() -> None:
    old = {"temperature": 0.0, "top_k": 5, "attention_bias": True, "max_length": 20}
    assert facts({}, old).default_sampling == SamplingParams(temperature=0.0, top_k=5)
    assert facts({"top_p": 0.5}, old).default_sampling == SamplingParams(top_p=0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "0"}, "temperature must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"min_p": 1.5}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"min_new_tokens": 4}, "min_new_tokens 4, which is not supported"),
        ({"typical_p": 0.9}, "typical_p 0.9, which is not supported"),
        ({"suppress_tokens": [3]}, "suppress_tokens"),
        ({"stop_strings": "END"}, "stop_strings"),
        ({"num_beams": 4}, "num_beams 4"),
        ({"frequency_penalty": 0.5}, "frequency_penalty 0.5"),
    ],
    ids=str,
)
def test_unusable_fields_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"generation_config .*{message}.*'vllm'"):
        facts(given)
    assert facts(given, use_generation_config=False).default_sampling == SamplingParams()


def test_fields_that_change_nothing() -> None:
    published = {  # in files of Llama 2 chat and other models
        "_from_model_config": True,
        "bos_token_id": 1,
        "do_sample": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "max_length": 4096,
        "transformers_version": "4.32.0.dev0",
        "cache_implementation": "hybrid",
        "chat_format": "chatml",
        "max_window_size": 6144,
    }
    neutral = {"num_beams": 1, "typical_p": 1.0, "bad_words_ids": None, "suppress_tokens": []}
    assert facts(published | neutral).default_sampling == SamplingParams()


@pytest.mark.parametrize(
    ("generation_config", "hf_config", "expected"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 7}, (0,)),
        ({"eos_token_id": [3, 5, 3]}, {}, (3, 5)),
        ({"eos_token_id": None}, {"eos_token_id": [7]}, (7,)),
        ({}, {}, ()),
    ],
    ids=str,
)
def test_eos_token_ids(generation_config: Any, hf_config: Any, expected: tuple[int, ...]) -> None:
    assert facts(generation_config, hf_config).eos_token_ids == expected


WRONG = (True, -1, 2.0, "2", [1, [2]], {"id": 2}, 2**31, 10**400, [7] * 2000)


@pytest.mark.parametrize("eos", WRONG, ids=lambda value: str(value)[:20])
def test_an_eos_token_id_that_is_not_a_token_id(eos: Any) -> None:
    for configs, place in (
        (({"eos_token_id": eos}, {}), "generation_config"),
        (
            ({}, {"eos_token_id": eos}),
            "config.json",
        ),
    ):
        with pytest.raises(ConfigError, match=f"eos_token_id .* of the model's {place}"):
            facts(*configs)


def test_a_server_limits_max_tokens_to_the_models_limit() -> None:
    most = facts({"max_new_tokens": 7}).max_new_tokens
    assert most == 7
    for requested, limited in ((None, 7), (100, 7), (7, 7), (3, 3)):
        assert limit_max_tokens(SamplingParams(max_tokens=requested), most).max_tokens == limited
    assert limit_max_tokens(SamplingParams(max_tokens=None), None).max_tokens is None
