"""The parts of ``jaxinfer.ray`` without Ray: what is compared, forwarded, answered and refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.ray import ingress
from jaxinfer.ray.forwarded import MAX_COMPARED, Forwarded, compared_text
from jaxinfer.ray.ingress import Forwarder, WholeAnswer, body_of, ingress_app
from jaxinfer.ray.replica import Answering
from jaxinfer.ray.settings import configs
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.service.service import Service
from kit.engines import tiny_engine, tiny_limits
from kit.server import LocalRenderer

LIMITS = tiny_limits()
SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "extensions": {},
}
START = {"type": "http.response.start", "status": 200, "headers": []}
MORE = {"type": "http.response.body", "body": b"a", "more_body": True}
END = {"type": "http.response.body", "body": b"b", "more_body": False}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "Once"}, "Once"),
        ({"prompt": ["Once", "Then"]}, "OnceThen"),
        ({"prompt": [5, 19]}, "5 19 "),
        ({"input": "Once", "instructions": "Be kind. "}, "Be kind. Once"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "hi"),
        (
            {
                "system": [{"type": "text", "text": "S "}],
                "messages": [{"content": [{"text": "a"}]}],
            },
            "S a",
        ),
        ({"messages": [{"content": None}, 5.0, None]}, " "),
        ({"model": "m"}, " "),
        ([], " "),
        ("x", " "),
        ({"prompt": "x" * (MAX_COMPARED + 9)}, "x" * MAX_COMPARED),
    ],
)
def test_text_that_the_router_compares(fields: Any, text: str) -> None:
    assert compared_text(json.dumps(fields).encode()) == text


@pytest.mark.parametrize("body", [b"", b"{", b'{"prompt": ' + b"[" * 100_000, b"\xff"])
def test_bodies_that_are_not_json_have_no_text(body: bytes) -> None:
    assert compared_text(body) == " "


class Answers:
    """An answer of a replica: batches of messages, or an error in their place."""

    def __init__(self, *batches: Sequence[Message] | Exception, waits: bool = False) -> None:
        self.batches, self.waits = batches, waits
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[Sequence[Message]]:
        for batch in self.batches:
            if isinstance(batch, Exception):
                raise batch
            yield batch
        if self.waits:
            await self.cancelled.wait()
            raise KeyError("cancelled")

    def cancel(self) -> None:
        self.cancelled.set()


def forwarded(
    answers: list[Any],
    body: Sequence[Message] = (),
    max_bytes: int = 99,
    leaves: bool = False,
    **more: Any,
) -> tuple[list[Message], list[Forwarded]]:
    """What the client gets, and the requests that replicas get."""
    sent: list[Message] = []
    asked: list[Forwarded] = []
    messages = [*(body or [{"type": "http.request", "body": b'{"prompt": "x"}'}])]

    def ask(request: Forwarded) -> Answers:
        asked.append(request)
        return answers[len(asked) - 1]

    async def ask_all(request: Forwarded) -> list[WholeAnswer]:
        asked.append(request)
        return answers

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        app = ingress_app(Forwarder(ask, ask_all, (EngineError,), KeyError, max_bytes))
        await asyncio.wait_for(app(SCOPE | more, receive, send), 10)

    asyncio.run(run())
    return sent, asked


def test_messages_are_passed_on() -> None:
    sent, (request,) = forwarded([Answers([START], [MORE, END])])
    assert sent == [START, MORE, END]
    assert request.prompt == "x" and request.body == b'{"prompt": "x"}'
    assert "extensions" not in request.scope and request.scope["path"] == "/v1/completions"


def test_a_request_that_has_no_answer_yet_goes_to_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress, "RETRY_SECONDS", (0.0, 0.01, 0.01))
    lost = Answers(EngineError("it has ended"))
    sent, asked = forwarded([lost, lost, Answers([START, END])])
    assert sent == [START, END] and len(asked) == 3 and lost.cancelled.is_set()
    sent, asked = forwarded([lost] * 3)
    assert len(asked) == 3 and sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "replicas_lost"
    with pytest.raises(EngineError):
        forwarded([Answers([START, MORE], EngineError("it has ended"))])


def test_an_answer_is_cancelled_if_the_client_leaves_before_its_end() -> None:
    answer = Answers([START, MORE], waits=True)
    sent, _ = forwarded([answer], leaves=True)
    assert sent == [START, MORE] and answer.cancelled.is_set()
    whole = Answers([START, END])
    forwarded([whole], leaves=True)
    with pytest.raises(KeyError):  # not by this client
        forwarded([Answers([START], KeyError("cancelled"))])


def test_only_so_much_of_a_body_is_read_that_it_is_refused() -> None:
    parts = [{"type": "http.request", "body": b"x" * 60, "more_body": True}] * 3
    _, (request,) = forwarded([Answers([START, END])], parts)
    assert len(request.body) == 120


def test_websockets_are_closed() -> None:
    sent, asked = forwarded([], type="websocket")
    assert sent[0]["type"] == "websocket.close" and not asked


def test_metrics_of_all_replicas() -> None:
    first, other = Metrics("m", LIMITS), Metrics("m", LIMITS)
    first.http_response("/v1/models", "GET", 200, 0.1)
    whole = []
    for name, metrics in (("a", first), ("b", other)):
        kind, body = metrics.render("")
        headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        messages = [{**START, "headers": headers}, {**END, "body": body}]
        whole.append(WholeAnswer(name, messages))
    accepts = [(b"accept", b"application/openmetrics-text"), (b"x-api-key", b"k")]
    sent, (request,) = forwarded(whole, path="/metrics", method="GET", headers=accepts)
    assert request.scope["headers"] == [(b"x-api-key", b"k")]
    text = body_of(sent).decode()
    assert (b"content-length", b"%d" % len(text)) in sent[0]["headers"]
    read, own = (
        list(text_string_to_metric_families(one)) for one in (text, body_of(whole[0][1]).decode())
    )
    assert {one.name for one in read} == {one.name for one in own}
    assert len({one.name for one in read}) == len(read), "each family once"
    by_replica = [(s.name, s.labels.pop("replica"), s.labels) for f in read for s in f.samples]
    for family in own:
        for sample in family.samples:
            assert (sample.name, "a", sample.labels) in by_replica
    assert ("vllm:num_requests_running", "b", {"model_name": "m", "engine": "0"}) in by_replica
    refused = [{**START, "status": 401}, END]
    sent, _ = forwarded([whole[0], WholeAnswer("b", refused)], path="/metrics", method="GET")
    assert sent == refused
    sent, _ = forwarded([], path="/metrics", method="GET")
    assert sent[0]["status"] == 503


def with_replica(use: Callable[[Answering], Awaitable[None]], **settings: Any) -> None:
    """Call ``use`` with a replica whose engine runs on a thread."""

    async def run() -> None:
        _, config = configs({"model": "unused", **settings})
        service, engine = Service(config, EventLog(), LocalRenderer()), tiny_engine()
        metrics = Metrics("tiny", engine.limits, start=[engine.stats()])
        client = EngineClient(EngineThread(engine), metrics.observe)
        service.attach(client, metrics)
        try:
            await use(Answering(service, "first"))
        finally:
            await client.shutdown()

    asyncio.run(run())


def request(**fields: Any) -> Forwarded:
    return Forwarded.of(SCOPE, json.dumps({"max_tokens": 8, "ignore_eos": True, **fields}).encode())


def test_a_replica_answers_as_the_server() -> None:
    async def use(replica: Answering) -> None:
        batches = [one async for one in replica.answer(request(prompt=[5, 9]))]
        head, *body = [message for batch in batches for message in batch]
        assert head["status"] == 200 and not body[-1].get("more_body")
        whole = json.loads(b"".join(message["body"] for message in body))
        assert whole["usage"]["completion_tokens"] == 8
        batches = [one async for one in replica.answer(request(prompt=[5], stream=True))]
        streamed = b"".join(message.get("body", b"") for batch in batches for message in batch)
        assert streamed.endswith(b"data: [DONE]\n\n")
        refused = [one async for one in replica.answer(request(prompt=5))]
        assert refused[0][0]["status"] == 400
        await replica.check_health()
        name, messages = await replica.whole_answer(request(prompt=[5, 9]))
        assert name == "first" and messages[0]["status"] == 200

    with_replica(use)


def test_a_request_ends_with_its_reader_and_an_engine_that_has_ended_answers_no_more() -> None:
    async def use(replica: Answering) -> None:
        client = replica.service.client
        answer = replica.answer(request(prompt=[5], stream=True, max_tokens=100))
        await anext(answer)
        assert client.num_open == 1
        await answer.aclose()  # type: ignore[attr-defined]
        assert client.num_open == 0
        await client.shutdown()
        with pytest.raises(EngineError, match="of this replica has ended"):
            await anext(replica.answer(request(prompt=[5])))
        with pytest.raises(Exception, match="the engine has stopped"):
            await replica.check_health()

    with_replica(use)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 8000}, "port is no setting of a replica on Ray; Ray's proxy listens"),
        ({"data_parallel_size": 2}, "set num_replicas"),
        ({"admin_api_key": "k"}, "would reach one replica only"),
        ({"max_model_length": 9}, "'max_model_length' in the arguments of build_app is no setting"),
        ({"max_model_len": "long"}, "max_model_len in the arguments of build_app must be"),
    ],
)
def test_settings_that_do_not_apply_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configs({"model": "m", **settings})


def test_settings_of_a_replica() -> None:
    engine, server = configs({"model": "/x/m", "max-model-len": "4k", "served_model_name": "n"})
    assert engine.max_model_len == 4000 and server.served_model_name == ("n",)
    assert server.checked_hosts is None and server.max_stored_responses == 0
    assert configs({"model": "m", "max_stored_responses": 9})[1].max_stored_responses == 9
