"""The official ``anthropic`` client against ``jaxinfer serve``, with the tests of ``openai``'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from kit.openai_server import CHAT, KEY, SECONDS


@pytest.fixture(scope="module")
def anthropic(url: str) -> Iterator[Anthropic]:
    base = url.removesuffix("/v1")
    with Anthropic(base_url=base, api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        yield client


def test_both_apis_answer_the_same(client: OpenAI, anthropic: Anthropic, model: str) -> None:
    theirs = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_tokens=24
    )
    fields: Any = {"model": model, "messages": CHAT}
    greedy: Any = {"max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = anthropic.messages.create(**fields, **greedy)
    with anthropic.messages.stream(**fields, **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == theirs.choices[0].message.content and "Paris" in text
    assert theirs.usage is not None
    for answer in (whole, final):
        assert [block.text for block in answer.content if block.type == "text"] == [text]
        usage = answer.usage
        assert usage.output_tokens == theirs.usage.completion_tokens
        num_input = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert num_input == theirs.usage.prompt_tokens
    assert anthropic.messages.count_tokens(**fields).input_tokens == theirs.usage.prompt_tokens


def test_a_begun_answer_is_continued(anthropic: Anthropic, model: str) -> None:
    begun: Any = {"role": "assistant", "content": "The capital of France is"}
    answer = anthropic.messages.create(
        model=model,
        messages=[*CHAT, begun],
        max_tokens=8,
        stop_sequences=["."],
        extra_body={"temperature": 0},
    )
    assert answer.stop_reason == "stop_sequence"
    assert [block.text for block in answer.content if block.type == "text"] == [" Paris"]
