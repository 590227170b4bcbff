"""Fields of a request over HTTP: their effect on the answer, and refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxinfer.server.api.fields import UNSUPPORTED
from jaxinfer.server.openai.schema import CHAT_UNSUPPORTED
from kit.api_calls import (
    CHAT,
    CHAT_IDS,
    CHATS,
    COMPLETIONS,
    GENERATE,
    GREEDY,
    ask,
    refusal,
)
from kit.server import Serving


def choice(server: Serving, **fields: Any) -> Any:
    """The only choice of a completion."""
    (found,) = ask(server, COMPLETIONS, **{"prompt": "hello", **GREEDY, **fields})["choices"]
    return found


# prompts


@pytest.mark.parametrize("keep", [3, -1], ids=str)
def test_a_prompt_is_truncated_at_its_beginning(server: Serving, keep: int) -> None:
    ids = [number % 200 for number in range(500)]
    kept = ids[-3:] if keep == 3 else ids[-120:]  # -1 leaves max_tokens of the context
    fields = {"truncate_prompt_tokens": keep, "return_token_ids": True}
    cut = choice(server, prompt=ids, **fields)
    assert cut["prompt_token_ids"] == kept
    assert cut["token_ids"] == choice(server, prompt=kept, return_token_ids=True)["token_ids"]


def test_a_truncated_prompt_is_echoed_truncated(server: Serving) -> None:
    assert choice(server, prompt="abcdef", truncate_prompt_tokens=2, echo=True)["text"][:2] == "ef"


@pytest.mark.parametrize(("max_tokens", "text"), [(1, "\u00e9"), (0, "\ufffd")])
def test_an_echoed_prompt_may_end_within_a_character(
    server: Serving, max_tokens: int, text: str
) -> None:
    first, second = "\u00e9".encode()
    fields = {"prompt": [first], "logit_bias": {second: 100.0}, "max_tokens": max_tokens}
    assert choice(server, **fields, echo=True)["text"] == text


def test_a_prompt_beyond_the_context(server: Serving) -> None:
    error = refusal(server, COMPLETIONS, prompt="x" * 200)
    assert error["param"] == "prompt" and "128" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert refusal(server, COMPLETIONS, prompt="x" * 20_000)["code"] == "context_length_exceeded"
    several = refusal(server, COMPLETIONS, prompt=["x", "x" * 200])
    assert (several["param"], several["code"]) == ("prompt[1]", "context_length_exceeded")
    chat = refusal(server, CHATS, messages=[{"role": "user", "content": "x" * 200}])
    assert (chat["param"], chat["code"]) == ("messages", "context_length_exceeded")


# ends of an output


def test_stop_strings(server: Serving) -> None:
    whole = choice(server)["text"]
    stop = whole[2:4]
    at = whole.index(stop)
    stopped = choice(server, stop=["\0\0", stop])
    assert (stopped["text"], stopped["stop_reason"]) == (whole[:at], stop)
    assert stopped["finish_reason"] == "stop"
    assert choice(server, stop=stop, include_stop_str_in_output=True)["text"] == whole[:at] + stop


def test_stop_ids_and_min_tokens(server: Serving) -> None:
    ids = choice(server, return_token_ids=True)["token_ids"]
    fields = {"stop_token_ids": [ids[3]], "return_token_ids": True}
    stopped = choice(server, **fields)
    first = ids.index(ids[3])
    assert stopped["token_ids"] == ids[: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", ids[3])
    longer = choice(server, **fields, min_tokens=6)
    assert len(longer["token_ids"]) >= 6 and ids[3] not in longer["token_ids"][:5]


# sampling


def test_a_bias_forces_a_token(server: Serving) -> None:
    forced = choice(server, logit_bias={"65": 100}, temperature=1)
    assert forced["text"] == "A" * 8


def test_n_and_best_of(server: Serving) -> None:
    fields = {"prompt": "hello", "n": 3, "seed": 1, "max_tokens": 8}
    choices = ask(server, COMPLETIONS, best_of=3, **fields)["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2]
    assert len({one["text"] for one in choices}) == 3
    for best_of in (1, 4):
        assert refusal(server, COMPLETIONS, best_of=best_of, **fields)["param"] == "best_of"
    for path, given in ((CHATS, CHAT), (GENERATE, {"prompt": "a"})):
        error = refusal(server, path, best_of=2, **given)
        assert error["param"] == "best_of" and "the same as n, 1" in error["message"]


@pytest.mark.parametrize(
    "prompts", [["hello", "abc"], [[104, 105], [97, 98, 99]]], ids=["texts", "token ids"]
)
def test_a_batch_of_prompts(server: Serving, prompts: list[Any]) -> None:
    """Its choices are those of each prompt alone, prompt by prompt."""
    fields = {"n": 2, "seed": 1, "max_tokens": 4}
    answer = ask(server, COMPLETIONS, prompt=prompts, **fields)
    alone = [ask(server, COMPLETIONS, prompt=prompt, **fields) for prompt in prompts]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    texts = [one["text"] for each in alone for one in each["choices"]]
    assert [one["text"] for one in answer["choices"]] == texts
    total = sum(each["usage"]["total_tokens"] for each in alone)
    assert answer["usage"]["total_tokens"] == total


def test_stop_strings_are_no_patterns(server: Serving) -> None:
    text = choice(server)["text"]
    assert choice(server, stop=[".", ".*", "[^x]", text[:2] + "?"])["text"] == text


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.9},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_penalties(server: Serving, fields: dict[str, float]) -> None:
    swayed = {"logit_bias": {"65": 12}, "max_tokens": 16}
    assert choice(server, **swayed, **fields)["text"] != choice(server, **swayed)["text"]


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_huge_values_leave_something_to_draw(server: Serving, name: str) -> None:
    drawn = [choice(server, **{"temperature": 1, "seed": n, name: 1e30})["text"] for n in range(3)]
    assert len(set(drawn)) == 3


def test_the_least_repetition_penalty_repeats(server: Serving) -> None:
    assert set(choice(server, repetition_penalty=1e-30)["text"]) <= set("hello")


def test_the_least_top_p_is_greedy(server: Serving) -> None:
    assert choice(server, temperature=1, top_p=1e-300)["text"] == choice(server)["text"]


def test_fields_that_change_no_greedy_answer(server: Serving) -> None:
    fields = {
        "min_p": 0.1, "top_k": 40, "top_p": 0.5, "priority": -3, "cache_salt": "a", "user": "me",
        "seed": 4, "skip_special_tokens": True, "timeout": 30, "use_beam_search": False,
    }  # fmt: skip
    assert choice(server, **fields)["text"] == choice(server)["text"]


# logprobs


def test_prompt_logprobs(server: Serving) -> None:
    for found in (
        choice(server, prompt="abc", prompt_logprobs=2)["prompt_logprobs"],
        ask(server, GENERATE, prompt="abc", prompt_logprobs=2, **GREEDY)["prompt_logprobs"],
    ):
        first, *others = found
        assert first is None and len(others) == 2
        for token, position in zip(b"bc", others, strict=True):
            assert position[str(token)]["decoded_token"] == chr(token)
            assert {entry["rank"] for entry in position.values()} >= {1, 2}
            assert all(entry["logprob"] <= 0 for entry in position.values())
    chat = ask(server, CHATS, prompt_logprobs=0, **CHAT, **GREEDY)["prompt_logprobs"]
    assert [list(position) for position in chat[1:]] == [[str(token)] for token in CHAT_IDS[1:]]
    assert refusal(server, COMPLETIONS, prompt="a", prompt_logprobs=1, stream=True)["param"] == (
        "prompt_logprobs"
    )


def test_tokens_as_ids(server: Serving) -> None:
    fields = {"logprobs": 1, "return_token_ids": True}
    plain = choice(server, **fields)
    spelt = choice(server, return_tokens_as_token_ids=True, **fields)["logprobs"]
    assert spelt["tokens"] == [f"token_id:{token}" for token in plain["token_ids"]]
    assert spelt["token_logprobs"] == plain["logprobs"]["token_logprobs"]
    assert spelt["top_logprobs"][0].keys() == {spelt["tokens"][0]}


# requests and their ids


def test_request_ids(server: Serving) -> None:
    with server.client() as client:
        fields = {"prompt": "a", **GREEDY}
        header = {"X-Request-Id": "outer"}
        outer = client.post(COMPLETIONS, json=fields, headers=header)
        assert outer.json()["id"] == "cmpl-outer" and outer.headers["x-request-id"] == "outer"
        inner = client.post(COMPLETIONS, json={**fields, "request_id": "inner"}, headers=header)
        assert inner.json()["id"] == "cmpl-inner" and inner.headers["x-request-id"] == "outer"
        new = client.post(COMPLETIONS, json=fields)
        assert new.json()["id"] == f"cmpl-{new.headers['x-request-id']}"
        assert ask(server, CHATS, request_id="c", **CHAT, **GREEDY)["id"] == "chatcmpl-c"
        assert ask(server, GENERATE, request_id="g", **fields)["id"] == "g"
        assert client.get("/none", headers=header).headers["x-request-id"] == "outer"
        odd = client.get("/version", headers={"X-Request-Id": "x" * 1000}).headers["x-request-id"]
        assert odd.startswith("req-")


def test_unknown_fields_are_logged_once(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            choice(server, colour="red", depth=3)
    told = [record.__dict__["fields"]["name"] for record in caplog.records]
    assert told == ["colour", "depth"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((COMPLETIONS, name) for name in (*UNSUPPORTED, "suffix")),
        *((CHATS, name) for name in CHAT_UNSUPPORTED),
    ],
    ids=lambda part: part.rpartition("/")[2],
)
def test_unsupported_fields_are_named(server: Serving, path: str, name: str) -> None:
    prompts = CHAT if path == CHATS else {"prompt": "a"}
    error = refusal(server, path, **prompts, **{name: "something"})
    assert error["param"] == name and error["message"].startswith(f"{name} is not supported")
