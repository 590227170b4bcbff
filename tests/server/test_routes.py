"""Every route, and every field that changes an answer, over HTTP."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import __version__
from jaxinfer.server.app import ROUTES
from jaxinfer.server.fields import UNSUPPORTED
from jaxinfer.server.guard import OPEN_PATHS
from jaxinfer.server.schema import CHAT_UNSUPPORTED
from kit.engines import tiny_engine
from kit.server import Serving, serving
from kit.tokenizers import TINY_BOS_ID, TINY_EOS_ID

KEY = "sesame"
ORIGIN = "https://example.org"
COMPLETIONS, CHATS, GENERATE = "/v1/completions", "/v1/chat/completions", "/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_IDS = [TINY_BOS_ID, 259, *b"hi", TINY_EOS_ID, 260]
ALL_ROUTES = [
    (method, path.replace("{model:path}", "tiny-llama"))
    for method, path in (*ROUTES, ("GET", "/openapi.json"))
]
TAKES_JSON = [path for method, path in ALL_ROUTES if method == "POST"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """As users start it."""
    with serving(tiny_engine()) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Serving]:
    """With everything set that is off by default."""
    with serving(
        tiny_engine(),
        api_key=(KEY, "another"),
        allowed_origins=(ORIGIN,),
        strict_fields=True,
        served_model_name=("tiny/one", "two"),
        return_tokens_as_token_ids=True,
        enable_force_include_usage=True,
        response_role="bot",
    ) as running:
        yield running
        running.wait_until_idle()


def ask(server: Serving, path: str, **fields: Any) -> Any:
    response = server.post(path, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def choice(server: Serving, **fields: Any) -> Any:
    """The only choice of a completion."""
    (found,) = ask(server, COMPLETIONS, **{"prompt": "hello", **GREEDY, **fields})["choices"]
    return found


def error_of(response: httpx.Response, status: int) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def refusal(server: Serving, path: str, **fields: Any) -> Any:
    return error_of(server.post(path, **fields), 400)


def send(server: Serving, method: str, path: str, **options: Any) -> httpx.Response:
    with server.client() as client:
        return client.request(method, path, **options)


def get(server: Serving, path: str, **options: Any) -> httpx.Response:
    return send(server, "GET", path, **options)


# what the server tells about itself


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_health(server: Serving, path: str) -> None:
    response = get(server, path)
    assert (response.status_code, response.content) == (200, b"")


def test_version(server: Serving) -> None:
    assert get(server, "/version").json() == {"version": __version__}


def test_models(server: Serving, guarded: Serving) -> None:
    listed = get(server, "/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list" and card["id"] == "tiny-llama"
    assert card["max_model_len"] == 128 and card["object"] == "model"
    assert get(server, "/v1/models/tiny-llama").json() == card
    with guarded.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names == ["tiny/one", "two"]
        assert client.get("/v1/models/tiny/one").json()["id"] == "tiny/one"
        assert client.get("/v1/models/tiny%2Fone").json()["root"] == "tiny-llama"


def test_a_model_that_is_not_there(server: Serving) -> None:
    for response in (get(server, "/v1/models/no"), server.post(CHATS, model="no", **CHAT)):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_document_has_every_route(server: Serving) -> None:
    document = get(server, "/openapi.json").json()
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    routes = {(method, path.replace(":path}", "}")) for method, path in ROUTES}
    assert described == routes | {("GET", "/openapi.json")}
    request = document["components"]["schemas"]["ChatCompletionRequest"]
    assert ["tiny-llama"] in [form.get("enum") for form in request["properties"]["model"]["anyOf"]]


def series(server: Serving) -> dict[str, float]:
    """Each sample of /metrics, its labels but the status left out."""
    response = get(server, "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            name = sample.name + sample.labels.get("finished_reason", "")
            found[name] = found.get(name, 0) + sample.value
    return found


def test_counters_move(server: Serving) -> None:
    before, stats = series(server), get(server, "/stats").json()
    ask(server, COMPLETIONS, prompt=["abcd", "efg"], n=2, **GREEDY)
    server.wait_until_idle()
    after, now = series(server), get(server, "/stats").json()
    expected = {
        "jaxinfer:requests_received_total": 2,  # one for each prompt
        "vllm:generation_tokens_total": 32,
        "vllm:request_success_totallength": 4,
        "vllm:request_generation_tokens_count": 4,
        "jaxinfer:late_compiles_total": 0,
    }
    assert {name: after[name] - before[name] for name in expected} == expected
    assert after["jaxinfer:late_compiles_total"] == 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert now["tokens"]["generated"] - stats["tokens"]["generated"] == 32
    assert now["late_compiles"] == 0 and now["pages"]["live"] == 0
    assert now["model"] == "tiny-llama"


# tokens


@pytest.mark.parametrize("text", ["", "hello", "héllo 日本 👋🏽", "<|user|>x<|eos|>"])
def test_tokenize_and_back(server: Serving, text: str) -> None:
    tokens = ask(server, "/tokenize", prompt=text)
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 128
    assert tokens["token_strs"] is None
    assert ask(server, "/detokenize", tokens=tokens["tokens"]) == {"prompt": text}


def test_token_strings(server: Serving) -> None:
    tokens = ask(server, "/tokenize", prompt="ab<|eos|>", return_token_strs=True)
    assert tokens["tokens"] == [*b"ab", TINY_EOS_ID]
    assert tokens["token_strs"] == ["a", "b", "<|eos|>"]


def test_tokenize_messages(server: Serving) -> None:
    assert ask(server, "/tokenize", **CHAT)["tokens"] == CHAT_IDS
    shorter = ask(server, "/tokenize", add_generation_prompt=False, **CHAT)["tokens"]
    assert shorter == CHAT_IDS[:-1]
    answer = ask(server, CHATS, return_token_ids=True, **CHAT, **GREEDY)
    assert answer["prompt_token_ids"] == CHAT_IDS


def test_tokenize_needs_one_of_both(server: Serving) -> None:
    assert refusal(server, "/tokenize")["param"] == "prompt"
    assert refusal(server, "/tokenize", prompt="a", **CHAT)["param"] == "prompt"


def test_detokenize_knows_the_vocabulary(server: Serving) -> None:
    assert refusal(server, "/detokenize", tokens=[1, 320])["param"] == "tokens"
    assert ask(server, "/detokenize", tokens=[]) == {"prompt": ""}


# prompts


@pytest.mark.parametrize("keep", [3, -1], ids=str)
def test_a_prompt_is_cut_at_its_beginning(server: Serving, keep: int) -> None:
    ids = [number % 200 for number in range(500)]
    kept = ids[-3:] if keep == 3 else ids[-120:]  # -1 leaves room for max_tokens
    fields = {"truncate_prompt_tokens": keep, "return_token_ids": True}
    cut = choice(server, prompt=ids, **fields)
    assert cut["prompt_token_ids"] == kept
    assert cut["token_ids"] == choice(server, prompt=kept, return_token_ids=True)["token_ids"]


def test_a_cut_prompt_is_echoed_as_cut(server: Serving) -> None:
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


# what ends an output


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


# how tokens are chosen


def test_a_bias_forces_a_token(server: Serving) -> None:
    forced = choice(server, logit_bias={"65": 100}, temperature=1)
    assert forced["text"] == "A" * 8


def test_n_and_best_of(server: Serving) -> None:
    fields = {"prompt": "hello", "n": 3, "seed": 1, "max_tokens": 8}
    choices = ask(server, COMPLETIONS, best_of=3, **fields)["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2]
    assert len({one["text"] for one in choices}) == 3
    assert refusal(server, COMPLETIONS, best_of=4, **fields)["param"] == "best_of"


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


def test_unknown_fields_are_told_once(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
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
        ("/tokenize", "tools"),
    ],
    ids=lambda part: part.rpartition("/")[2],
)
def test_what_is_not_supported_is_named(server: Serving, path: str, name: str) -> None:
    prompts = CHAT if path == CHATS else {"prompt": "a"}
    error = refusal(server, path, **prompts, **{name: "something"})
    assert error["param"] == name and error["message"].startswith(f"{name} is not supported")


# settings


def test_settings(guarded: Serving) -> None:
    with guarded.client(headers={"Authorization": "Bearer another"}) as client:
        answer = client.post(CHATS, json={**CHAT, **GREEDY, "logprobs": True}).json()
        assert answer["model"] == "tiny/one"
        assert answer["choices"][0]["message"]["role"] == "bot"
        first = answer["choices"][0]["logprobs"]["content"][0]["token"]
        assert first.startswith("token_id:")
        named = client.post(CHATS, json={**CHAT, **GREEDY, "model": "two"}).json()
        assert named["model"] == "two"
        fields = {**CHAT, **GREEDY, "return_tokens_as_token_ids": False, "logprobs": True}
        own = client.post(CHATS, json=fields).json()["choices"][0]["logprobs"]["content"]
        assert not own[0]["token"].startswith("token_id:")
        assert error_of(client.post(CHATS, json={**CHAT, "model": "tiny-llama"}), 404)
        unknown = error_of(client.post(CHATS, json={**CHAT, "colour": 1, "depth": 2}), 400)
        assert unknown["param"] == "colour" and "colour, depth" in unknown["message"]
        assert client.get("/openapi.json").json()["paths"]["/stats"]["get"]["security"]


def chunks(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    return [
        json.loads(frame.removeprefix("data: "))
        for frame in response.text.split("\n\n")
        if frame not in ("", "data: [DONE]")
    ]


def test_usage_of_streams(server: Serving, guarded: Serving) -> None:
    fields = {**CHAT, **GREEDY, "stream": True}
    assert all("usage" not in chunk for chunk in chunks(server.post(CHATS, **fields)))
    options = {"include_usage": True, "continuous_usage_stats": True}
    *gained, last = chunks(server.post(CHATS, **fields, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in gained]
    assert counts == sorted(counts) and last["usage"]["completion_tokens"] == counts[-1] == 8
    assert all(chunk["usage"]["prompt_tokens"] == len(CHAT_IDS) for chunk in gained)
    with guarded.client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        *_, forced = chunks(client.post(CHATS, json=fields))
        assert forced["choices"] == [] and forced["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_the_key_guards(guarded: Serving, method: str, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
        response = send(guarded, method, path, headers=headers)
        if path in OPEN_PATHS:
            assert response.status_code == 200
        else:
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    authorized = {"Authorization": f"Bearer {KEY}"}
    known = send(guarded, method, path, headers=authorized)
    assert known.status_code != 401
    counted = send(guarded, "GET", "/metrics", headers=authorized).text
    refused = f'http_requests_total{{handler="none",method="{method}",status="4xx"}}'
    assert path in OPEN_PATHS or refused in counted


def test_cors(server: Serving, guarded: Serving) -> None:
    asks = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    closed = get(server, "/version", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in closed.headers
    error_of(send(server, "OPTIONS", CHATS, headers=asks), 405)
    opened = send(guarded, "OPTIONS", CHATS, headers=asks)
    assert opened.status_code == 200
    assert opened.headers["access-control-allow-origin"] == ORIGIN
    other = send(guarded, "OPTIONS", CHATS, headers={**asks, "Origin": "https://other.org"})
    assert "access-control-allow-origin" not in other.headers


# requests that are no calls


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_other_methods(server: Serving, method: str, path: str) -> None:
    other = "POST" if method == "GET" else "GET"
    for wrong in (other, "DELETE"):
        response = send(server, wrong, path)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert method in response.headers["allow"].split(", ")


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/completions/", "/healthz"])
def test_other_paths(server: Serving, path: str) -> None:
    for method in ("GET", "POST"):
        assert error_of(send(server, method, path), 404)["code"] == "not_found"


@pytest.mark.parametrize("path", TAKES_JSON)
def test_other_content_types(server: Serving, path: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = send(server, "POST", path, content=b"{}", headers={"Content-Type": kind})
        assert error_of(response, 415)["code"] == "unsupported_media_type"
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert send(server, "POST", path, content=b"{}", headers=kind).status_code == 400


@pytest.mark.parametrize("path", TAKES_JSON)
def test_compressed_bodies(server: Serving, path: str) -> None:
    kind = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = send(server, "POST", path, content=gzip.compress(b"{}"), headers=kind)
    assert "'gzip'" in error_of(response, 415)["message"]
    assert response.headers["accept-encoding"] == "identity"
    kind["Content-Encoding"] = "identity"
    assert send(server, "POST", path, content=b"{}", headers=kind).status_code == 400


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_head(server: Serving, method: str, path: str) -> None:
    if method == "GET":
        response = send(server, "HEAD", path)
        assert (response.status_code, response.content) == (200, b"")
    else:
        assert send(server, "HEAD", path).status_code == 405
