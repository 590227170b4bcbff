"""Every route, its guards, the settings that affect it, and other methods and paths."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer import __version__
from jaxinfer.server.http.guard import OPEN_PATHS
from jaxinfer.server.routes.app import ROUTES
from kit.api_calls import (
    CHAT,
    CHAT_IDS,
    CHATS,
    COMPLETIONS,
    GREEDY,
    ask,
    error_of,
    refusal,
)
from kit.engines import tiny_engine
from kit.server import Serving, serving
from kit.tokenizers import TINY_EOS_ID

KEY = "sesame"
ORIGIN = "https://example.org"
ALL_ROUTES = [
    (route.method, route.path.replace("{model:path}", "tiny-llama"))
    for route in ROUTES
    if not route.is_admin
]
METHODS = {path: {one for one, other in ALL_ROUTES if other == path} for _, path in ALL_ROUTES}
WITHOUT_BODY = ("/ping", "/v1/responses/{response_id}/cancel")
TAKES_JSON = [path for method, path in ALL_ROUTES if method == "POST" and path not in WITHOUT_BODY]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Serving]:
    """A server with all settings that are off by default."""
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


def send(server: Serving, method: str, path: str, **options: Any) -> httpx.Response:
    with server.client() as client:
        return client.request(method, path, **options)


def get(server: Serving, path: str, **options: Any) -> httpx.Response:
    return send(server, "GET", path, **options)


# reports of the server


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


def test_an_unknown_model(server: Serving) -> None:
    for response in (get(server, "/v1/models/no"), server.post(CHATS, model="no", **CHAT)):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_document_has_every_route(server: Serving) -> None:
    document = get(server, "/openapi.json").json()
    described = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert described == {route.key for route in ROUTES if not route.is_admin}
    request = document["components"]["schemas"]["ChatCompletionRequest"]
    assert ["tiny-llama"] in [form.get("enum") for form in request["properties"]["model"]["anyOf"]]


def series(server: Serving) -> dict[str, float]:
    """Each sample of /metrics, by its labels without the status."""
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


def test_detokenize_refuses_ids_outside_the_vocabulary(server: Serving) -> None:
    assert refusal(server, "/detokenize", tokens=[1, 320])["param"] == "tokens"
    assert ask(server, "/detokenize", tokens=[]) == {"prompt": ""}


# settings


def test_settings(guarded: Serving) -> None:
    with guarded.client(headers={"Authorization": "Bearer another"}) as client:
        answer = client.post(CHATS, json={**CHAT, **GREEDY, "logprobs": True}).json()
        assert answer["model"] == "tiny/one"
        assert answer["choices"][0]["message"]["role"] == "bot"
        first = answer["choices"][0]["logprobs"]["content"][0]["token"]
        assert first.startswith("token_id:")
        named = client.post(CHATS, json={**CHAT, **GREEDY, "model": "two"}).json()
        assert named["model"] == "tiny/one"  # as in vLLM, whichever name a request has
        fields = {**CHAT, **GREEDY, "return_tokens_as_token_ids": False, "logprobs": True}
        own = client.post(CHATS, json=fields).json()["choices"][0]["logprobs"]["content"]
        assert not own[0]["token"].startswith("token_id:")
        assert error_of(client.post(CHATS, json={**CHAT, "model": "tiny-llama"}), 404)
        unknown = error_of(client.post(CHATS, json={**CHAT, "colour": 1, "depth": 2}), 400)
        assert unknown["param"] == "colour" and "colour, depth" in unknown["message"]
        assert client.get("/openapi.json").json()["paths"]["/stats"]["get"]["security"]


def test_generation_config_over_the_models() -> None:
    overrides = {"max_new_tokens": 3, "temperature": 0.0}
    fields = {"prompt": "hello", "ignore_eos": True}
    with serving(tiny_engine(), override_generation_config=overrides) as server:
        answers = [ask(server, COMPLETIONS, **fields, seed=seed) for seed in range(4)]
        usage = ask(server, COMPLETIONS, **fields, max_tokens=9, temperature=1.0)["usage"]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {3}
    assert usage["completion_tokens"] == 3


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


# other methods, paths and content types


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_other_methods(server: Serving, method: str, path: str) -> None:
    for wrong in {"GET", "POST", "DELETE"} - METHODS[path]:
        response = send(server, wrong, path)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert METHODS[path] <= set(response.headers["allow"].split(", "))


@pytest.mark.parametrize("path", ["/v1", "/v1/edits", "/v1//models", "/healthz"])
def test_other_paths(server: Serving, path: str) -> None:
    for method in ("GET", "POST"):
        assert error_of(send(server, method, path), 404)["code"] == "not_found"


BODIES = {  # bodies that get 200
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHATS: {**CHAT, "max_tokens": 1},
    "/v1/generate": {"prompt": "a", "max_tokens": 1},
    "/inference/v1/generate": {"token_ids": [65], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {**CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": CHAT,
    "/api/show": {"model": "tiny-llama"},
    "/api/chat": {**CHAT, "model": "tiny-llama", "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "model": "tiny-llama", "options": {"num_predict": 1}},
}
# of models for embeddings and scores: 400 here
NOT_TEXT = {path: {"input": "a"} for path in ("/v1/embeddings", "/pooling")}
NOT_TEXT |= {path: {"text_1": "a", "text_2": "b"} for path in ("/v1/score", "/score")}
RANKING = {"query": "a", "documents": ["b"]}
NOT_TEXT |= dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANKING)
NOT_TEXT["/api/embed"] = {"input": "a", "model": "tiny-llama"}
NOT_TEXT["/api/embeddings"] = {"prompt": "a", "model": "tiny-llama"}


def status_of(path: str) -> int:
    """The status of a right request; no response has the id ``{response_id}``."""
    if path in NOT_TEXT:
        return 400
    return 404 if "{" in path else 200


@pytest.mark.parametrize("slashes", ["/", "//"])
@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_a_slash_at_the_end_makes_no_difference(
    server: Serving, guarded: Serving, method: str, path: str, slashes: str
) -> None:
    bodies = BODIES | NOT_TEXT
    options = {"json": bodies[path]} if path in bodies else {}
    plain = send(server, method, path, **options)
    slashed = send(server, method, path + slashes, **options)
    assert plain.status_code == slashed.status_code == status_of(path)
    assert plain.headers.get("content-type") == slashed.headers.get("content-type")
    if path in ("/v1/models", "/v1/models/tiny-llama", "/openapi.json", "/tokenize"):
        assert plain.json() == slashed.json()
    for other in ({"GET", "POST", "DELETE"} - METHODS[path]) | {"HEAD", "OPTIONS"}:
        plain, slashed = send(server, other, path), send(server, other, path + slashes)
        assert plain.status_code == slashed.status_code
        assert plain.headers.get("allow") == slashed.headers.get("allow")
    assert send(guarded, method, path + slashes).status_code == (200 if path in OPEN_PATHS else 401)
    unknown = send(server, method, "/nowhere" + slashes)
    assert (
        error_of(unknown, 404)["message"]
        == error_of(send(server, method, "/nowhere"), 404)["message"]
    )


def test_slashes_below_a_root_path() -> None:
    with serving(tiny_engine(), root_path="/llm") as server:  # which a proxy removes
        assert get(server, "/v1/models/").json()["object"] == "list"
        assert get(server, "/health/").status_code == 200
        assert error_of(get(server, "/nowhere"), 404)["code"] == "not_found"


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
    if "GET" in METHODS[path]:
        response = send(server, "HEAD", path)
        assert (response.status_code, response.content) == (status_of(path), b"")
    else:
        assert send(server, "HEAD", path).status_code == 405
