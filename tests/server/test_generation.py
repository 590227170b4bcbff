"""The generation routes over HTTP: whole responses, streams, and their agreement."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxinfer.core.request import SamplingParams
from kit.api_calls import events, same
from kit.engines import run, tiny_engine
from kit.server import Serving

IDS = [5, 9, 12, 7]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def body(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_a_completion(server: Serving) -> None:
    answer = body(server.post("/v1/completions", prompt=IDS, return_token_ids=True, **GREEDY))
    (choice,) = answer["choices"]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (expected,) = run(tiny_engine(), [IDS], params)
    assert choice["token_ids"] == expected.outputs[0].token_ids
    assert choice["prompt_token_ids"] == IDS
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"logprobs": 2, "echo": True}])
def test_streamed_completions_add_up(server: Serving, n: int, extra: dict[str, Any]) -> None:
    fields = {
        "prompt": ["hello there", "good"], "seed": 3, "max_tokens": 6, "ignore_eos": True, "n": n,
    }  # fmt: skip
    whole = body(server.post("/v1/completions", **fields, **extra))["choices"]
    usage = {"include_usage": True}
    streamed = events(
        server.post("/v1/completions", **fields, **extra, stream=True, stream_options=usage)
    )
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"]["completion_tokens"] == 12 * n
    assert all(event["usage"] is None for event in streamed[:-1])
    for index in range(2 * n):
        parts = [e["choices"][0] for e in streamed[:-1] if e["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"]
        assert [part["finish_reason"] for part in parts][-1] == whole[index]["finish_reason"]
        if "logprobs" in extra:
            for name, expected in whole[index]["logprobs"].items():
                assert same([x for part in parts for x in part["logprobs"][name]], expected)


def test_a_chat(server: Serving) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    fields = {"messages": [{"role": "user", "content": "hi"}], "chat_template": template, **GREEDY}
    refused = server.post("/v1/chat/completions", **fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"


def test_scoring_only(server: Serving) -> None:
    fields = {"prompt": "hello there", "echo": True, "logprobs": 1, "temperature": 0}
    (scored,) = body(server.post("/v1/completions", **fields, max_tokens=0))["choices"]
    (longer,) = body(server.post("/v1/completions", **fields, max_tokens=1))["choices"]
    assert scored["text"] == "hello there"
    assert scored["finish_reason"] == "length"
    count = len(scored["logprobs"]["tokens"])
    assert longer["logprobs"]["tokens"][:count] == scored["logprobs"]["tokens"]
    assert len(longer["logprobs"]["tokens"]) == count + 1
    assert scored["logprobs"]["token_logprobs"][0] is None
    fields |= {"logit_bias": {"65": 100}, "stop_token_ids": [65]}
    (scored,) = body(server.post("/v1/completions", **fields, max_tokens=0))["choices"]
    assert (scored["finish_reason"], scored["stop_reason"]) == ("length", None)


def test_generate(server: Serving) -> None:
    whole = body(server.post("/v1/generate", prompt=IDS, **GREEDY))
    streamed = events(server.post("/v1/generate", prompt=IDS, stream=True, **GREEDY))
    text = "".join(output["text"] for event in streamed for output in event["outputs"])
    assert text == whole["outputs"][0]["text"]
    assert whole["latency_ms"] > 0 and streamed[-1]["usage"]["completion_tokens"] == 8


def test_token_ids_in_and_out(server: Serving) -> None:
    """vLLM's fields, also those of its SamplingParams that are null or change nothing."""
    sampling = {"temperature": 0, "max_tokens": 8.0, "logprobs": 1, "seed": None, "bad_words": []}
    fields = {"token_ids": IDS, "sampling_params": sampling | {"ignore_eos": True, "n": 2}}
    fields |= {"request_id": "own", "features": None, "kv_transfer_params": None, "priority": 1}
    whole = body(server.post("/inference/v1/generate", **fields))
    assert whole["request_id"] == "own" and whole["prompt_logprobs"] is None
    expected = body(server.post("/v1/generate", prompt=IDS, logprobs=1, n=2, **GREEDY))
    for choice, output in zip(whole["choices"], expected["outputs"], strict=True):
        assert choice["token_ids"] == output["token_ids"] and choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 8}]
        tokens = [one["token"] for one in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    streamed = events(server.post("/inference/v1/generate", **fields, stream=True))
    ids: dict[int, list[int]] = {0: [], 1: []}
    for event in streamed:
        for choice in event["choices"]:
            assert choice["weight_versions"] == [
                {
                    "version": 0,
                    "start": len(ids[choice["index"]]),
                    "end": len(choice["token_ids"]) + len(ids[choice["index"]]),
                }
            ]
            ids[choice["index"]] += choice["token_ids"]
    assert list(ids.values()) == [choice["token_ids"] for choice in whole["choices"]]
    usage = events(
        server.post(
            "/inference/v1/generate", **fields, stream=True, stream_options={"include_usage": True}
        )
    )[-1]["usage"]
    assert usage["completion_tokens"] == 16


@pytest.mark.parametrize(
    "fields", [{"model": "other"}, {"sampling_params": {"model": "other"}}], ids=["outer", "inner"]
)
def test_a_model_that_is_not_served(server: Serving, fields: dict[str, Any]) -> None:
    answer = server.post("/inference/v1/generate", token_ids=IDS, **fields)
    assert answer.status_code == 404 and "'other' does not exist" in answer.text


def test_logprobs_at_the_temperature(server: Serving) -> None:
    def logprobs(**more: Any) -> list[float]:
        sampling = {"temperature": 0.5, "seed": 3, "max_tokens": 4, "logprobs": 0, **more}
        fields = {"token_ids": IDS, "sampling_params": sampling}
        (choice,) = body(server.post("/inference/v1/generate", **fields))["choices"]
        return [one["logprob"] for one in choice["logprobs"]["content"]]

    plain = logprobs()
    assert plain == logprobs(temperature_scaled_logprobs=False)
    assert plain != logprobs(temperature_scaled_logprobs=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"use_beam_search": True}}, "sampling_params.use_beam_search"),
        ({"sampling_params": []}, "sampling_params"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_wrong_fields_of_token_requests(server: Serving, fields: Any, param: str) -> None:
    refused = server.post("/inference/v1/generate", **{"token_ids": IDS, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


def called(arguments: str) -> dict[str, Any]:
    function = {"arguments": arguments, "name": "weather"}
    calls = [{"id": "call_1", "type": "function", "function": function, "index": None}]
    history = [
        {"role": "user", "content": "hi", "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
        {"role": "assistant", "content": "12", "audio": None, "annotations": [], "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "ok"}]},
    ]
    return {"messages": history, "return_token_ids": True, **GREEDY}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_a_chat_with_calls_as_clients_send_it(server: Serving, route: str) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    answer = body(server.post(route, **called('{"city": "Paris"}')))
    ids = answer["tokens"] if route == "/tokenize" else answer["prompt_token_ids"]
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.removeprefix("<|bos|>") == (
        '<|user|>hi<|eos|><|assistant|>{"name": "weather", "arguments": {"city": "Paris"}}<|eos|>'
        "<|tool|><|eos|><|assistant|>12<|eos|>"
        "<|user|>ok<|eos|><|assistant|>"
    )
    broken = body(server.post(route, **called('{"city": "Paris", "day": Monday}')))
    assert ids == (broken["tokens"] if route == "/tokenize" else broken["prompt_token_ids"])
    error = server.post(route, **called('["Paris"]')).json()["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert error["code"] is None and "another JSON value" in error["message"]
