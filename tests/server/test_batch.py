"""OpenAI's batch files: requests as lines, answered by the app without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.routes.app import create_app
from jaxinfer.server.routes.batch import BatchCounts, run_batch
from jaxinfer.server.service.service import Service
from kit.engines import tiny_engine
from kit.server import LocalRenderer, serving

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}

NO_BODY = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}'


def line(custom_id: Any, url: Any = "/v1/completions", body: Any = COMPLETION, **other: Any):
    """A line of a batch file."""
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **other}
    return json.dumps(fields).encode() + b"\n"


def answered(app: Any, lines: list[bytes], **options: Any) -> tuple[BatchCounts, list[Any]]:
    """The counts, and the lines of the output."""
    written: list[bytes] = []
    run = run_batch(app, lines, written.append, **{"num_at_once": 4, **options})
    return asyncio.run(run), [json.loads(one) for one in written]


class Echoing:
    """An app that answers with the request's body, after its ``seconds``."""

    def __init__(self) -> None:
        self.open = self.most_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        await asyncio.sleep(json.loads(body)["seconds"])
        self.open -= 1
        headers = [(b"x-request-id", b"req-1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})


def test_output_is_in_the_order_of_the_input() -> None:
    app, advanced = Echoing(), list[float]()
    seconds = [0.05, 0.0, 0.02, 0.0, 0.0]
    lines = [line(f"{n}", body={"seconds": s, "n": n}) for n, s in enumerate(seconds)]
    counts, found = answered(app, lines, num_at_once=2, advance=advanced.append)
    assert [one["custom_id"] for one in found] == [*"01234"]
    assert [one["response"]["body"]["n"] for one in found] == [*range(5)]
    assert len({one["id"] for one in found}) == 5
    assert app.most_open == 2
    assert sum(advanced) == counts.total == 5 and counts.failed == 0


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'"\xff"', "invalid_json_line", None),
        (b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json_line", None),
        (line(None), "missing_required_parameter", "custom_id"),
        (line(""), "missing_required_parameter", "custom_id"),
        (line("first"), "duplicate_custom_id", "custom_id"),
        (line("a", method="GET"), "invalid_method", "method"),
        (line("a", url="/v1/nothing"), "invalid_url", "url"),
        (line("a", url="/v1/models"), "invalid_url", "url"),
        (line("a", url="/ping"), "invalid_url", "url"),
        (line("a", url="/api/chat"), "invalid_url", "url"),  # it streams unless it is told not to
        (line("a", url=["x"]), "invalid_url", "url"),
        (
            b'{"custom_id":"a","method":"POST","url":"/v1/completions"}',
            "missing_required_parameter",
            "body",
        ),
        (line("a", body=[]), "invalid_request", "body"),
        (line("a", body={"stream": True}), "invalid_request", "body.stream"),
    ],
)
def test_line_that_is_no_request_becomes_an_error(bad: bytes, code: str, param: str | None) -> None:
    good = line("first", body={"seconds": 0})
    counts, found = answered(Echoing(), [good, b" \n", bad, line("last", body={"seconds": 0})])
    assert counts == BatchCounts(total=3, failed=1)
    assert [one["response"] is not None for one in found] == [True, False, True]
    error = found[1]["error"]
    assert (error["code"], error["param"], error["line"]) == (code, param, 3)
    assert found[0]["error"] is None and found[2]["custom_id"] == "last"


def test_responses_are_the_server_s() -> None:
    """Also those of requests that the server refuses."""
    requests = {
        "whole": ("/v1/completions", COMPLETION),
        "chat": ("/v1/chat/completions", CHAT),
        "plain": ("/v1/generate", {"prompt": "ab", "max_tokens": 3, "temperature": 0}),
        # draws without a seed depend on the order of arrival, in which a chat comes later
        "tokens": (
            "/inference/v1/generate",
            {"token_ids": [1, 2], "sampling_params": {"temperature": 0}},
        ),
        "responses": ("/v1/responses", {"input": "ab", "max_output_tokens": 3, "temperature": 0}),
        "messages": ("/v1/messages", {**CHAT, "model": "tiny-llama"}),
        "wrong": ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
        "unknown": ("/v1/completions", {"prompt": "a", "model": "other"}),
    }
    engine = tiny_engine()

    async def run() -> tuple[BatchCounts, list[bytes]]:
        service = Service(ServerConfig(), EventLog(), LocalRenderer())
        metrics = Metrics(engine.facts.name, engine.limits, start=engine.stats())
        client = EngineClient(EngineThread(engine), metrics.observe)
        service.attach(client, metrics)
        lines, written = [line(name, *one) for name, one in requests.items()], list[bytes]()
        counts = await run_batch(create_app(service), lines, written.append, num_at_once=4)
        await client.shutdown()
        return counts, written

    counts, written = asyncio.run(run())
    assert counts == BatchCounts(total=8, failed=2)
    found = {one["custom_id"]: one["response"] for one in map(json.loads, written)}
    assert [*found] == [*requests]
    with serving(tiny_engine()) as server:
        for name, (url, body) in requests.items():
            response = server.post(url, **body)
            assert found[name]["status_code"] == response.status_code
            assert essence(found[name]["body"]) == essence(response.json())


def essence(body: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from call to call."""
    names = ("choices", "text", "token_ids", "content", "usage", "error")
    return {name: body[name] for name in names if name in body}
