"""The official ``openai`` client against ``jaxinfer serve``, the command as users start it.

Its engine is the default one, so that it shares the executables of the other tests here.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI, Stream
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

from jaxinfer import LLM, SamplingParams
from kit.golden import Golden
from kit.openai_server import CHAT, KEY, QUESTION, SECONDS, endless

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


# models


def test_models(client: OpenAI, model: str) -> None:
    (listed,) = client.models.list().data
    assert listed.object == "model" and listed.owned_by == "jaxinfer"
    assert client.models.retrieve(model) == listed
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o/mini")


# completions


def test_greedy_tokens_are_transformers_tokens(client: OpenAI, model: str, golden: Golden) -> None:
    rows = range(0, 30, 4)
    answer = client.completions.create(
        model=model,
        prompt=[golden.prompts[row] for row in rows],
        temperature=0,
        max_tokens=48,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    for choice, row in zip(answer.choices, rows, strict=True):
        ours = np.array(extra(choice)["token_ids"])
        different = np.flatnonzero(ours != golden.tokens[row, :48])
        close = len(different) and golden.margin[row, different[0]] < 1e-4
        assert not len(different) or close, f"prompt {row}, token {different[0]}"
        assert extra(choice)["prompt_token_ids"] == golden.prompts[row]


@pytest.mark.parametrize(
    "prompt", [[504, 2365, 282], ["The capital of", "Once"], [[504, 2365, 282], [504]]], ids=str
)
def test_forms_of_a_prompt(client: OpenAI, model: str, prompt: Any) -> None:
    answer = client.completions.create(model=model, prompt=prompt, n=2, seed=1, max_tokens=4)
    count = 1 if isinstance(prompt[0], int) else len(prompt)
    assert [choice.index for choice in answer.choices] == list(range(2 * count))
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 8 * count
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_seed_repeats(client: OpenAI, model: str) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model=model, prompt="Once upon a time", n=3, seed=seed, max_tokens=12, temperature=1
        )
        return [choice.text for choice in answer.choices]

    first = texts(7)
    assert texts(7) == first and len(set(first)) == 3 and texts(8) != first


def test_echo_and_logprobs(client: OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(
        model=model, prompt=prompt, echo=True, logprobs=3, max_tokens=3, temperature=0
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text.startswith(prompt) and logprobs is not None
    assert logprobs.tokens is not None and "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    offsets = np.cumsum([0, *map(len, logprobs.tokens[:-1])]).tolist()
    assert logprobs.text_offset == offsets
    for token, value, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == value and 3 <= len(top) <= 4 and value <= max(top.values()) <= 0


def test_stop(client: OpenAI, model: str) -> None:
    def answer(**more: Any) -> Any:
        (choice,) = client.completions.create(
            model=model, prompt="One, two, three, four,", max_tokens=30, temperature=0, **more
        ).choices
        return choice

    whole = answer()
    word = whole.text.split()[3]
    stopped = answer(stop=["\0", word])
    assert whole.finish_reason == "length"
    assert stopped.finish_reason == "stop" and extra(stopped)["stop_reason"] == word
    assert stopped.text == whole.text.partition(word)[0]
    kept = answer(stop=word, extra_body={"include_stop_str_in_output": True})
    assert kept.text == stopped.text + word


# chats


def test_a_chat_equals_the_librarys_answer(client: OpenAI, model: str, llm: LLM) -> None:
    answer = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    (output,) = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=24))
    (choice,) = answer.choices
    assert choice.message.content == output.outputs[0].text
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant" and choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
    assert answer.usage.completion_tokens == len(output.outputs[0].token_ids)


def test_content_in_parts(client: OpenAI, model: str) -> None:
    def content(given: Any) -> str | None:
        messages: list[Any] = [{"role": "user", "content": given}]
        answer = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_completion_tokens=6
        )
        assert answer.usage is not None and answer.usage.completion_tokens <= 6
        return answer.choices[0].message.content

    first, last = QUESTION.split("? ")
    parts = [{"type": "text", "text": f"{first}?"}, {"type": "text", "text": last}]
    assert content(parts) == content(f"{first}?\n{last}")


def test_chat_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CHAT, n=2, logprobs=True, top_logprobs=5, **GREEDY
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        said = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
        assert said.decode().removesuffix("<|im_end|>") == choice.message.content
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 5
            best = token.top_logprobs[0]  # greedy
            assert (best.token, best.logprob, best.bytes) == (
                token.token, token.logprob, token.bytes,
            )  # fmt: skip


def test_chat_stop(client: OpenAI, model: str) -> None:
    (choice,) = client.chat.completions.create(
        model=model, messages=CHAT, stop="Paris", **GREEDY
    ).choices
    assert choice.finish_reason == "stop" and extra(choice)["stop_reason"] == "Paris"
    assert choice.message.content and "Paris" not in choice.message.content


# streams


def test_a_streamed_completion(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {
        "model": model, "prompt": ["Once upon", "The capital"], "n": 2, "seed": 5,
        "max_tokens": 8, "logprobs": 2, "temperature": 1,
    }  # fmt: skip
    whole = client.completions.create(**fields)
    usage = {"include_usage": True}
    *events, last = client.completions.create(**fields, stream=True, stream_options=usage)
    assert last.choices == [] and last.usage == whole.usage
    for choice in whole.choices:
        assert whole_of(events, choice.index) == choice.text
        parts = [one for event in events for one in event.choices if one.index == choice.index]
        assert parts[-1].finish_reason == choice.finish_reason
        assert choice.logprobs is not None
        tokens = [token for part in parts for token in part.logprobs.tokens]
        assert tokens == choice.logprobs.tokens


def whole_of(events: list[Completion], index: int) -> str:
    return "".join(one.text for event in events for one in event.choices if one.index == index)


def test_a_streamed_chat(client: OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    stream: Stream[ChatCompletionChunk] = client.chat.completions.create(
        model=model, messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *events, last = stream
    assert content_of(events) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert [event.choices[0].finish_reason for event in events][-1] == "stop"
    assert all(event.usage is None for event in events)
    assert last.choices == [] and last.usage == whole.usage


def content_of(events: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for e in events for choice in e.choices)


def test_a_streamed_response(client: OpenAI, model: str) -> None:
    """``/v1/responses`` gives the chat's answer, and goes on with it."""
    whole = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    fields: Any = {"model": model, "temperature": 0, "max_output_tokens": 24}
    with client.responses.stream(input=QUESTION, **fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.choices[0].message.content
    assert final.usage is not None and whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    more = [
        {"role": "assistant", "content": final.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    chat = client.chat.completions.create(model=model, messages=[*CHAT, *more], **GREEDY)
    response = client.responses.create(
        input="And of Italy?", previous_response_id=final.id, **fields
    )
    assert response.output_text == chat.choices[0].message.content


def test_async_streams_side_by_side(client: OpenAI, url: str, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)

    async def one(client: AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=CHAT, stream=True, **GREEDY
        )
        return content_of([event async for event in stream])

    async def several() -> list[str]:
        async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            answer = await client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
            assert answer.choices[0].message.content == whole.choices[0].message.content
            return await asyncio.gather(*(one(client) for _ in range(6)))

    assert asyncio.run(several()) == [whole.choices[0].message.content] * 6


def test_leaving_a_stream_frees_its_pages(client: OpenAI, model: str) -> None:
    stream = endless(client, model)
    next(iter(stream))
    before = stats(client)
    assert before["requests"]["running"] == 1 and before["pages"]["live"] > 0
    stream.close()
    deadline = time.monotonic() + SECONDS
    while (now := stats(client))["pages"]["live"] or now["requests"]["active"]:
        assert time.monotonic() < deadline, now
        time.sleep(0.01)
    finished = {name: now["requests"]["finished"][name] for name in ("abort", "length")}
    assert finished["abort"] == before["requests"]["finished"]["abort"] + 1
    assert finished["length"] == before["requests"]["finished"]["length"]


def stats(client: OpenAI) -> Any:
    return client.get(str(client.base_url).replace("/v1/", "/stats"), cast_to=object)


# fields of vLLM that OpenAI does not have


def extra(part: Any) -> dict[str, Any]:
    """Fields that the client's types do not have."""
    assert part.model_extra is not None
    return part.model_extra


def test_sampling_fields_of_vllm(client: OpenAI, model: str) -> None:
    greedy = client.chat.completions.create(model=model, messages=CHAT, **GREEDY)
    for fields in ({"top_k": 1}, {"min_p": 1.0}):
        answer = client.chat.completions.create(
            model=model, messages=CHAT, max_tokens=24, temperature=1, extra_body=fields
        )
        assert answer.choices[0].message.content == greedy.choices[0].message.content
    penalised = client.chat.completions.create(
        model=model, messages=CHAT, extra_body={"repetition_penalty": 1.8}, **GREEDY
    )
    assert penalised.choices[0].message.content != greedy.choices[0].message.content


@pytest.mark.parametrize("fields", [{"min_tokens": 24}, {"ignore_eos": True}], ids=str)
def test_going_on(client: OpenAI, model: str, fields: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model=model, messages=CHAT, extra_body=fields, **GREEDY)
    assert answer.usage is not None and answer.usage.completion_tokens == 24
    assert answer.choices[0].finish_reason == "length"


def test_prompt_logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=CHAT, extra_body={"prompt_logprobs": 2, "return_token_ids": True},
        **GREEDY,
    )  # fmt: skip
    first, *others = extra(answer)["prompt_logprobs"]
    token_ids = extra(answer)["prompt_token_ids"]
    assert first is None and len(others) == len(token_ids) - 1
    for token_id, position in zip(token_ids[1:], others, strict=True):
        assert 2 <= len(position) <= 3
        assert position[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}
        assert {entry["rank"] for entry in position.values()} >= {1, 2}


def test_continuing_a_message(client: OpenAI, model: str) -> None:
    messages: list[Any] = [*CHAT, {"role": "assistant", "content": "The capital of France"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(
        model=model, messages=messages, extra_body=fields, **GREEDY
    )
    assert answer.choices[0].message.content == " is Paris."
    echoed = client.chat.completions.create(
        model=model, messages=messages, extra_body={**fields, "echo": True}, **GREEDY
    )
    assert echoed.choices[0].message.content == "The capital of France is Paris."


def test_template_kwargs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        **GREEDY,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
