"""The size of a request's answers is bounded before they are computed; other sizes are, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.points import Point
from jaxinfer.engine.requests import points
from jaxinfer.engine.requests.points import SteeringVectors
from jaxinfer.server.api import parse
from jaxinfer.server.api.parse import MAX_CONTAINERS
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.schema import ChatCompletionRequest, CompletionRequest
from jaxinfer.server.service.limits import LOGPROB_BYTES, TOKEN_BYTES
from kit.engines import tiny_engine
from kit.raw_http import RawClient, post
from kit.server import Serving, serving
from kit.server_process import wait_until
from kit.watched_executor import watched_engine

MOST = 30_000
USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(tiny_engine(), max_answer_bytes=MOST) as running:
        yield running


TOO_LARGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "logprobs": (COMPLETIONS, "logprobs", {"prompt": "a", "max_tokens": 30, "logprobs": 20}),
    "n": (COMPLETIONS, "logprobs", {"prompt": "a", "max_tokens": 10, "logprobs": 5, "n": 10}),
    "n alone": (COMPLETIONS, "n", {"prompt": "a", "max_tokens": 100, "n": 40}),
    "prompts": (COMPLETIONS, "max_tokens", {"prompt": ["a"] * 40, "max_tokens": 100}),
    "prompt_logprobs": (
        COMPLETIONS,
        "prompt_logprobs",
        {"prompt": "a" * 30, "max_tokens": 1, "prompt_logprobs": 20},
    ),
    "echo": (
        COMPLETIONS,
        "logprobs",
        {"prompt": ["a" * 30] * 5, "max_tokens": 0, "echo": True, "logprobs": 5},
    ),
    "echo and prompt_logprobs": (
        COMPLETIONS,
        "prompt_logprobs",
        {"prompt": "a" * 17, "max_tokens": 0, "echo": True, "logprobs": 4, "prompt_logprobs": 20},
    ),
    "text": (COMPLETIONS, "echo", {"prompt": "a" * 60, "max_tokens": 1, "echo": True, "n": 500}),
    "text of control characters": (
        COMPLETIONS,
        "echo",
        {"prompt": "\x01" * 60, "max_tokens": 1, "echo": True, "n": 84},
    ),
    "text of ids": (
        COMPLETIONS,
        "echo",
        {"prompt": [[1] * 30] * 2, "max_tokens": 0, "echo": True, "n": 200},
    ),
    "a stream's text": (
        COMPLETIONS,
        "echo",
        {"prompt": "a" * 60, "max_tokens": 1, "echo": True, "n": 500, "stream": True},
    ),
    "text of beams": (
        COMPLETIONS,
        "echo",
        {"prompt": ["a" * 64] * 50, "max_tokens": 1, "echo": True, "n": 10}
        | {"use_beam_search": True},
    ),
    "ids": (
        COMPLETIONS,
        "return_token_ids",
        {"prompt": "a" * 60, "max_tokens": 1, "return_token_ids": True, "n": 70},
    ),
    "a stream's ids": (
        COMPLETIONS,
        "return_token_ids",
        {"prompt": [1] * 60, "max_tokens": 1, "return_token_ids": True, "n": 70, "stream": True},
    ),
    "a chat's message": (
        CHAT,
        "echo",
        {"messages": [*USER, {"role": "assistant", "content": "a" * 40}], "max_tokens": 1}
        | {"echo": True, "n": 800, "continue_final_message": True, "add_generation_prompt": False},
    ),
    "a chat's parts": (
        CHAT,
        "echo",
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a" * 40}]}]}
        | {"max_tokens": 1, "echo": True, "n": 800, "stream": True},
    ),
    "logprob_token_ids": (
        COMPLETIONS,
        "logprobs",
        {"prompt": "a", "max_tokens": 30, "logprobs": 0, "logprob_token_ids": list(range(20))},
    ),
    "beams": (
        COMPLETIONS,
        "logprobs",
        {"prompt": "a", "max_tokens": 20, "logprobs": 9, "n": 5, "use_beam_search": True},
    ),
    "a chat": (
        CHAT,
        "top_logprobs",
        {"messages": USER, "max_tokens": 30, "logprobs": True, "top_logprobs": 20},
    ),
    "a stream": (
        CHAT,
        "top_logprobs",
        {"messages": USER, "max_tokens": 30, "logprobs": True, "top_logprobs": 20, "stream": True},
    ),
    "generate": ("/v1/generate", "logprobs", {"prompt": "a", "max_tokens": 30, "logprobs": 20}),
    "tokens": (
        "/inference/v1/generate",
        "logprobs",
        {"token_ids": [1], "sampling_params": {"max_tokens": 30, "logprobs": 20}},
    ),
    "responses": (
        "/v1/responses",
        "top_logprobs",
        {
            "input": "a",
            "max_output_tokens": 30,
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
        },
    ),
    "detokenize": ("/detokenize", "tokens", {"tokens": [1] * MOST}),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_answers_that_may_be_too_large_are_refused(server: Serving, case: str) -> None:
    path, field, fields = TOO_LARGE[case]
    reply = post(server.port, path, **fields)
    assert reply.status == 400 and reply.error["param"] == field, reply
    assert "--max-answer-bytes" in reply.error["message"] and f" {MOST} " in reply.error["message"]


def test_the_bound_is_exact_and_near_the_real_size(server: Serving) -> None:
    fitting = MOST // (TOKEN_BYTES + 21 * LOGPROB_BYTES)
    fields = {"messages": USER, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    reply = post(server.port, CHAT, **fields, max_tokens=fitting)
    assert 0.7 * MOST < len(reply.body) < MOST
    assert post(server.port, CHAT, **fields, max_tokens=fitting + 1).status == 400
    # a limit that the request does not set is lowered
    default = post(server.port, CHAT, **fields).json
    assert default["usage"]["completion_tokens"] == fitting
    assert default["choices"][0]["finish_reason"] == "length"
    refused = post(server.port, CHAT, **fields, min_tokens=fitting + 1)
    assert refused.error["param"] == "top_logprobs"


@pytest.mark.parametrize("prompt", ["a\x01b" * 20, [7] * 60], ids=["text", "ids"])
def test_what_choices_repeat_of_the_prompt_is_near_its_real_size(
    server: Serving, prompt: str | list[int]
) -> None:
    """Each choice has the text and the ids of its prompt."""
    fields = {"prompt": prompt, "max_tokens": 1, "echo": True, "return_token_ids": True}
    num_choices = next(
        n for n in range(40, 0, -1) if post(server.port, COMPLETIONS, **fields, n=n).status == 200
    )
    reply = post(server.port, COMPLETIONS, **fields, n=num_choices)
    fixed = 200 * num_choices + 300  # of a choice, and of the answer
    assert 0.3 * MOST < len(reply.body) < MOST + fixed


def test_prompts_that_an_answer_has_once_count_once(server: Serving) -> None:
    for path, prompt in ((CHAT, {"messages": USER}), ("/v1/generate", {"prompt": "a" * 6})):
        fields = {**prompt, "max_tokens": 1, "n": 20, "prompt_logprobs": 20}
        reply = post(server.port, path, **fields, return_token_ids=True)
        assert reply.status == 200 and len(reply.body) < MOST
        assert len(reply.json["prompt_logprobs"]) == len(reply.json["prompt_token_ids"])


def test_the_bound_can_be_raised() -> None:
    with serving(tiny_engine(), max_answer_bytes=2 * MOST) as server:
        path, _, fields = TOO_LARGE["logprobs"]
        assert post(server.port, path, **fields).status == 200


# other sizes


def test_lists_and_objects_of_a_body_are_limited_in_number() -> None:
    """An empty object of 2 bytes takes 64 in memory, and messages may have any fields."""
    junk = b"[" + b"{}," * MAX_CONTAINERS + b"{}]"
    body = b'{"messages": [{"role": "user", "content": "a", "x": ' + junk + b"}]}"
    with pytest.raises(ApiError, match="more than 250000 lists and objects"):
        parse.parse(body, ChatCompletionRequest)
    text = 'a "quoted" \\ text ' + "[{" * MAX_CONTAINERS
    assert parse.parse(json.dumps({"prompt": text}).encode(), CompletionRequest)
    fitting = b'{"prompt": "a", "x": [' + b"{}," * (MAX_CONTAINERS - 3) + b"{}]}"
    assert parse.parse(fitting, CompletionRequest)


def test_a_chat_template_of_a_request_is_limited_in_length() -> None:
    for path in (CHAT, "/tokenize"):
        with serving(watched_engine()[0], trust_request_chat_template=True) as server:
            fields = {"messages": USER, "chat_template": "{#" + "x" * ((1 << 18) - 5) + "#}a"}
            assert post(server.port, path, **fields).status == 200
            fields["chat_template"] += "x"
            refused = post(server.port, path, **fields)
            assert refused.status == 400 and refused.error["param"] == "chat_template"


def test_background_responses_are_limited_in_number() -> None:
    engine, executor = watched_engine(2)
    with serving(engine, max_stored_responses=3) as server, ExitStack() as stack:
        fields = {"input": "a", "background": True, "max_output_tokens": 2}
        with executor.held():
            for _ in range(3):
                assert post(server.port, "/v1/responses", **fields).status == 200
            refused = post(server.port, "/v1/responses", **fields)
            assert refused.status == 429 and refused.error["param"] == "background"
            assert int(refused.headers["retry-after"]) > 0
            client = stack.enter_context(RawClient(server.port))
            client.post("/v1/responses", **{**fields, "background": False})
        assert client.reply().status == 200
        wait_until(lambda: not server.service.background, "all are done")
        assert post(server.port, "/v1/responses", **fields).status == 200


def test_steering_vectors_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "MAX_VECTORS", 2)
    vectors = SteeringVectors([Point("layers.0.resid_post", (4,), "float32")])
    vector = np.zeros(4, np.float32)
    for name in ("a", "b", "a"):
        vectors.set(name, vector)
    with pytest.raises(RequestError, match="2 steering vectors are set"):
        vectors.set("c", vector)
    vectors.set("a", None)
    vectors.set("c", vector)
