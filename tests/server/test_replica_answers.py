"""Two engines behind one server answer as one, in every API, whichever a request reaches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxinfer.exec.step.points import points_named
from kit.api_calls import same
from kit.engines import EOS, tiny_engine, tiny_limits
from kit.server import Serving, serving
from kit.server_process import wait_until
from kit.tiny_models import tiny_model

POINT = "layers.0.resid_post"
LIMITS = tiny_limits(points=points_named((POINT,), tiny_model("llama")[0].config))
ADMIN = {"Authorization": "Bearer admin"}
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "ignore_eos": True}
ENDING = {"frequency_penalty": 2.0, "seed": 1, "logit_bias": {str(EOS): 20, "125": 10}}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
VARYING = {"id", "created", "created_at", "completed_at", "system_fingerprint", "request_id"}
VARYING |= {"latency", "item_id", "call_id", "output_id"}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": [5, 9, 3], "max_tokens": 6, **GREEDY}),
    "several": (
        "/v1/completions",
        {"prompt": [[5, 9], [7] * 20, [3]], "n": 3, "max_tokens": 6, "seed": 4, "logprobs": 2},
    ),
    "beams": (
        "/v1/completions",
        {"prompt": [5, 9], "n": 3, "max_tokens": 5, "use_beam_search": True, **GREEDY},
    ),
    "echo": (
        "/v1/completions",
        {"prompt": [5, 9, 3], "echo": True, "max_tokens": 0, "logprobs": 1},
    ),
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 6, **GREEDY}),
    "choices": (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 6, "n": 2, "seed": 1, "logprobs": True},
    ),
    "schema": (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 60, "response_format": FORMAT, **ENDING},
    ),
    "response": ("/v1/responses", {"input": "hello", "max_output_tokens": 6, "temperature": 0}),
    "message": ("/v1/messages", {"messages": HELLO, "max_tokens": 6, "temperature": 0}),
    "ollama": (
        "/api/chat",
        {"messages": HELLO, "options": {"num_predict": 6, "temperature": 0}, "model": "tiny-llama"},
    ),
    "tokens": (
        "/inference/v1/generate",
        {"token_ids": [5, 9, 3], "sampling_params": {"max_tokens": 6, **GREEDY}},
    ),
}
STREAMED = ("completion", "several", "chat", "choices", "schema", "response", "message", "ollama")


@pytest.fixture(scope="module")
def one() -> Iterator[Serving]:
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Serving, list[Any]]]:
    engines = [tiny_engine() for _ in range(2)]
    with serving(*engines, admin_api_key=("admin",)) as running:
        yield running, engines
        running.wait_until_idle()
        assert [engine.stats().num_live_pages for engine in engines] == [0, 0]


def fixed(value: Any) -> Any:
    """An answer without what differs from call to call: ids, times, cached tokens."""
    if isinstance(value, dict):
        kept = {name: one for name, one in value.items() if name not in VARYING}
        times = [
            name for name in kept if "duration" in name or "cached" in name or "cache_" in name
        ]
        return {name: fixed(one) for name, one in kept.items() if name not in times}
    return [fixed(one) for one in value] if isinstance(value, list) else value


def answer(server: Serving, name: str, **more: Any) -> Any:
    path, fields = CALLS[name]
    stream = {"stream": False} if path == "/api/chat" else {}
    response = server.post(path, **(fields | stream | more))
    assert response.status_code == 200, response.text
    return fixed(response.json())


def text_of(server: Serving, name: str) -> list[str]:
    """The text of a streamed answer, by choice."""
    path, fields = CALLS[name]
    response = server.post(path, **fields, stream=True)
    assert response.status_code == 200, response.text
    texts: dict[int, str] = {}
    for line in response.text.splitlines():
        line = line.removeprefix("data: ")
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        assert "error" not in event, event
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + delta
        delta = event.get("delta")
        if isinstance(delta, dict):
            delta = delta.get("text")
        content = event.get("message", {}).get("content") or ""
        texts[-1] = texts.get(-1, "") + (delta or "") + (content if content else "")
    return [texts[index] for index in sorted(texts)]


def computed(engines: list[Any]) -> list[int]:
    return [engine.stats().num_iterations for engine in engines]


@pytest.mark.parametrize("name", CALLS)
def test_whole_answers(one: Serving, two: tuple[Serving, list[Any]], name: str) -> None:
    server, engines = two
    expected, before = answer(one, name), computed(engines)
    for _ in range(3):
        assert same(answer(server, name), expected)
    assert all(np.array(computed(engines)) > before), "both have answered"


@pytest.mark.parametrize("name", STREAMED)
def test_streams(one: Serving, two: tuple[Serving, list[Any]], name: str) -> None:
    expected = text_of(one, name)
    assert any(expected)
    assert [text_of(two[0], name) for _ in range(3)] == [expected] * 3


def test_a_conversation_goes_on_with_either_engine(
    one: Serving, two: tuple[Serving, list[Any]]
) -> None:
    texts = []
    for server in (one, two[0]):
        fields: dict[str, Any] = {"max_output_tokens": 6, "temperature": 0}
        found, previous = [], None
        for number in range(4):
            more = {} if previous is None else {"previous_response_id": previous}
            response = server.post("/v1/responses", input=f"hello {number}", **fields, **more)
            assert response.status_code == 200, response.text
            previous = response.json()["id"]
            found.append(response.json()["output"][0]["content"][0]["text"])
        with server.client() as client:
            kept = client.get(f"/v1/responses/{previous}").json()
        assert kept["output"][0]["content"][0]["text"] == found[-1]
        texts.append(found)
    assert texts[0] == texts[1]


def test_pauses_reach_both(one: Serving, two: tuple[Serving, list[Any]]) -> None:
    server, engines = two
    plain = answer(one, "completion")
    with server.client(headers=ADMIN) as client, ThreadPoolExecutor() as pool:
        assert client.post("/pause").status_code == 200
        assert client.get("/is_paused").json() == {"is_paused": True}
        before = computed(engines)
        held = [pool.submit(answer, server, "completion") for _ in range(4)]
        wait_until(lambda: server.service.client.num_open == 4, "four wait")
        assert client.get("/health").status_code == 200 and computed(engines) == before
        assert client.post("/resume").status_code == 200
        assert [one.result() for one in held] == [plain] * 4
        assert all(np.array(computed(engines)) > before)
        assert client.post("/reset_prefix_cache").status_code == 200


def test_steering_vectors_reach_both() -> None:
    engines = [tiny_engine(LIMITS) for _ in range(2)]
    vector = {"name": "up", "vector": [float(i) for i in range(32)]}
    own = [{"point": POINT, "scale": 4.0, "vector": vector["vector"]}]
    named = [{"point": POINT, "scale": 4.0, "name": "up"}]
    with (
        serving(*engines, admin_api_key=("admin",)) as server,
        server.client(headers=ADMIN) as client,
    ):
        assert client.post("/set_steering", json=vector).status_code == 200
        steered = answer(server, "completion", steer=own)
        assert steered != answer(server, "completion")
        assert [answer(server, "completion", steer=named) for _ in range(3)] == [steered] * 3
        wrong = client.post("/set_steering", json={"name": "up", "vector": [1.0]})
        assert wrong.status_code == 400
        assert [answer(server, "completion", steer=named) for _ in range(3)] == [steered] * 3
        assert min(computed(engines)) > 0
        taps = [answer(server, "completion", taps=[POINT]) for _ in range(3)]
        assert taps[1:] == taps[:1] * 2 and POINT in taps[0]["choices"][0]["taps"]
