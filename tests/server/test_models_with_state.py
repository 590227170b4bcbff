"""Models whose sequences have states, over HTTP: tiny ones of random weights with chat templates.

Their thoughts are any bytes and end at their budget. The form of a required call has one city.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from kit.answer_matrix import Seen, read, read_stream
from kit.one_model import OneModel
from kit.scripted import TEMPLATES
from kit.server import Serving, serving

pytest.importorskip("llguidance")
pytestmark = pytest.mark.nightly  # the steps of each model compile for 10 to 25 s

LENGTH = 2560  # DeepSeek's template describes tools in 1,500 bytes, which are tokens here
MODELS = MappingProxyType(
    {
        "deepseek_v4": "deepseek-v4",
        "glm5_next": "glm-4.6",
        "qwen4_exp": "qwen3.5",
        "xlstm": "qwen3",  # none of its own is published
    }
)
# They begin in the prompt, or with a budget; a random model begins none by itself.
THINKS_NOT = "glm5_next"
# of each pool, so few that three of the sequences below have to be preempted
PAGES = MappingProxyType(
    {"deepseek_v4": (34, 200, 200), "glm5_next": (120, 120), "qwen4_exp": (120, 120), "xlstm": ()}
)
BUDGET = 12
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "Is it warm in Rome?"}]
THINKS = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}, "temperature": 0}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": QUESTION,
            "max_tokens": 300,
            "thinking_token_budget": BUDGET,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": QUESTION[0]["content"],
            "max_output_tokens": 300,
            "thinking_token_budget": BUDGET,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": QUESTION,
            "max_tokens": 300,
            "thinking": {"type": "enabled", "budget_tokens": BUDGET},
            "tools": [{"name": "weather", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> OneModel:
    return OneModel(request.param, chunk=256, max_model_len=LENGTH, extras=True)


@pytest.fixture(scope="module")
def server(model: OneModel) -> Iterator[Serving]:
    template = (TEMPLATES / f"{MODELS[model.name]}.jinja").read_text("utf-8")
    with serving(model.engine(chat_template=template)) as running:
        yield running
        running.wait_until_idle()


@pytest.mark.parametrize("api", BODIES)
def test_a_call_after_thoughts(model: OneModel, server: Serving, api: str) -> None:
    path, body = BODIES[api]
    whole = read(api, server.post(path, **THINKS, **body).json())
    arguments = json.dumps({"city": "Rome"}, separators=(",", ":"))
    assert (0 < len(whole.reasoning) <= BUDGET) == (model.name != THINKS_NOT)
    assert whole == Seen(whole.reasoning, "", (("weather", arguments),), "tool_calls")
    streamed = server.post(path, stream=True, **THINKS, **body)
    assert read_stream(api, streamed.text) == whole


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt without repetitions, in which no two choices of an indexer are nearly equal."""
    return np.random.default_rng(seed).integers(256, size=length).tolist()


def completed(server: Serving, salt: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a prompt that shares no prefix with those of another salt."""
    answer = server.post("/v1/completions", cache_salt=salt, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def left(server: Serving, salt: str, body: dict[str, Any]) -> None:
    """Read the first events of a stream, then close it."""
    sent = {**body, "stream": True, "cache_salt": salt}
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=sent) as answer,
    ):
        for _, _line in zip(range(6), answer.iter_lines(), strict=False):
            pass


FIRST = {"prompt": prompt_of(1, 150), "max_tokens": 90, "temperature": 0}
OTHERS: tuple[dict[str, Any], ...] = (
    {"prompt": prompt_of(2, 140), "max_tokens": 90, "temperature": 1, "seed": 4, "n": 2},
    {"prompt": prompt_of(3, 133), "max_tokens": 80, "temperature": 0, "logprobs": 2},
    {"prompt": prompt_of(4, 129), "max_tokens": 20, "temperature": 0, "prompt_logprobs": 1},
    {
        "prompt": prompt_of(5, 90),
        "max_tokens": 80,
        "temperature": 0,
        "structured_outputs": {"regex": "[a-z]{70}[0-9]{2}"},
    },
    {
        "prompt": prompt_of(6, 65),
        "max_tokens": 60,
        "temperature": 0,
        "repetition_penalty": 1.3,
        "min_tokens": 50,
        "stop_token_ids": [*range(64)],
    },
)


def test_the_next_turn_reuses_the_first(server: Serving) -> None:
    answer = completed(server, "chat", FIRST)["choices"][0]["token_ids"]
    turn = [*FIRST["prompt"], *answer, *prompt_of(7, 30)]
    body = {"prompt": turn, "max_tokens": 30, "temperature": 0, "logprobs": 1}
    again, new = completed(server, "chat", body), completed(server, "new", body)
    check_same(new["choices"], again["choices"])
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (new, again)]
    assert cached[0] == 0 and cached[1] >= 128


def test_answers_in_company(model: OneModel) -> None:
    """Requests of all kinds have the tokens and logprobs that they have alone, with few pages and
    next to a stream that its client leaves.
    """
    with serving(model.engine(PAGES[model.name])) as server:
        alone = [completed(server, "alone", body) for body in (FIRST, *OTHERS)]
        assert not server.engine.stats().num_preemptions
        with ThreadPoolExecutor(8) as pool:
            leaves = pool.submit(left, server, "together", {**FIRST, "max_tokens": 150})
            together = pool.map(lambda one: completed(server, "together", one), (FIRST, *OTHERS))
            for one, same in zip(alone, together, strict=True):
                check_same(one["choices"], same["choices"])
            leaves.result()
        server.wait_until_idle()
        preempted = server.engine.stats().num_preemptions
    assert preempted or not PAGES[model.name]  # without pages none has to be


def check_same(choices: list[Any], others: list[Any]) -> None:
    """The choices have the same tokens, and logprobs up to rounding."""
    for one, same in zip(choices, others, strict=True):
        assert one["token_ids"] == same["token_ids"]
        assert one["finish_reason"] == same["finish_reason"]
        if one["logprobs"]:
            found, expected = (each["logprobs"]["token_logprobs"] for each in (same, one))
            np.testing.assert_allclose(found, expected, atol=2e-4)
        if one.get("prompt_logprobs"):
            found, expected = (
                [
                    max(token["logprob"] for token in of.values())
                    for of in each["prompt_logprobs"][1:]
                ]
                for each in (same, one)
            )
            np.testing.assert_allclose(found, expected, atol=2e-4)
