"""Errors of ``jaxinfer serve``, as the official ``openai`` client raises them; ids of requests."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from kit.openai_server import CHAT, QUEUE, endless


def test_request_ids(client: OpenAI, model: str) -> None:
    raw = client.completions.with_raw_response.create(
        model=model, prompt="hi", max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.request_id == "mine-1"
    answer = raw.parse()
    assert answer.id == "cmpl-mine-1" and answer._request_id == "mine-1"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
WRONG = {
    "max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "type": ({"temperature": "hot"}, "temperature"),
    "message": ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    "tools": ({"tools": [{**TOOL, "type": "retrieval"}]}, "tools[0].type"),
    "format": ({"response_format": {"type": "yaml"}}, "response_format.type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_requests_name_the_field(client: OpenAI, model: str, case: str) -> None:
    fields, param = WRONG[case]
    request: dict[str, Any] = {"model": model, "messages": CHAT, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**request)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.status_code == 400 and param.partition("[")[0] in caught.value.message
    assert caught.value.request_id and caught.value.request_id.startswith("req-")


def test_a_chat_beyond_the_context(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "long " * 9000}]
        )
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_suffix_is_refused(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        client.completions.create(model=model, prompt="a", suffix="b")


def test_a_wrong_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=CHAT)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_wrong_key(client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_full_queue(client: OpenAI, model: str, stream: bool) -> None:
    with endless(client, model) as busy:
        next(iter(busy))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(
                model=model, prompt=["hi"] * 4 * QUEUE, max_tokens=1, stream=stream
            )
    assert caught.value.code == "queue_full" and caught.value.type == "rate_limit_error"
    assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_deadline(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(
            model=model, prompt="hi", max_tokens=1000,
            extra_body={"timeout": 0.05, "ignore_eos": True},
        )  # fmt: skip
    assert caught.value.status_code == 408 and caught.value.code == "deadline_exceeded"
