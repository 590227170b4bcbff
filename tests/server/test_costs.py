"""Costs per request and token that were reduced once: nested calls, repeated checks of ids."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxinfer.cli import serve
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.request import FinishReason, RequestSpec
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link import client as client_module
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.wire import Command, Submission
from jaxinfer.engine.requests.news import EngineStats, News
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.engine.requests.validate import check_request
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.http.sse import frame
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.openai import schema
from jaxinfer.server.openai.responses import CompletionChunk, CompletionChunkChoice, encode
from jaxinfer.server.openai.writer import Envelope
from jaxinfer.server.routes.app import ExactPaths, create_app
from jaxinfer.server.service.service import Service
from jaxinfer.text.tokenizer import load_tokenizer
from kit.sim_executor import sim_facts, sim_limits
from kit.tokenizers import real_spec

MAX_CALLS = 5  # between a task and the future that a token wakes
STREAMED = {"prompt": [[5, 6], [7, 8]], "stream": True, "max_tokens": 3}


class FakeLink(Link):
    """A link to an engine that only records requests; the test writes its updates."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(real_spec("smollm2"))
        self.limits, self.facts = sim_limits(4), sim_facts(self.tokenizer)
        self.stats = EngineStats()
        self.keys: list[str] = []

    def connect(self, listener: object) -> None:
        pass

    def _pass(self, command: Command) -> None:
        if isinstance(command, Submission):
            self.keys.append(command.request_id)

    def stop(self) -> None:
        pass


class FakeRequest:
    """One request to an app with a ``FakeLink``: the sent messages, and the engine's updates."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.service = Service(ServerConfig(), EventLog())
        self.link = FakeLink()
        self.client = EngineClient(self.link)
        self.service.attach(self.client, Metrics(self.link.facts.name, self.link.limits))
        self.sent: list[Message] = []
        self._body = [json.dumps(fields).encode()]

    async def run(self) -> None:
        """Send the request; return at the end of the response."""
        scope = {
            **{"type": "http", "method": "POST", "path": "/v1/completions", "root_path": ""},
            "headers": [(b"content-type", b"application/json")],
        }
        await create_app(self.service)(scope, self._receive, self._send)

    async def update(self, **fields: Any) -> None:
        """An iteration of the engine adds this to every request."""
        deltas = tuple(Delta(key, 0, **fields) for key in self.link.keys)
        self.client.receive(News(deltas, (), (), EngineStats()))
        await run_loop()

    async def _receive(self) -> Message:
        if not self._body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._body.pop()}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


async def run_loop() -> None:
    """Run the loop until no task can continue."""
    for _ in range(10):
        await asyncio.sleep(0)


def calls_of(task: asyncio.Task[Any]) -> list[str]:
    """The coroutines that a waiting task returns through, from the outside in."""
    names: list[str] = []
    waiting: Any = task.get_coro()
    while isinstance(waiting, Coroutine):
        names.append(cast("Any", waiting).cr_code.co_qualname)
        waiting = cast("Any", waiting).cr_await
    return names


def test_a_token_returns_through_few_calls() -> None:
    async def main() -> tuple[list[list[str]], list[Message]]:
        request = FakeRequest(STREAMED)
        running = asyncio.create_task(request.run())
        await run_loop()
        await request.update(text="a", token_ids=(1,))
        chains = [calls_of(task) for task in asyncio.all_tasks()]
        await request.update(finish_reason=FinishReason.LENGTH)
        await running
        return [chain for chain in chains if "Answer.read" in chain], request.sent

    readers, sent = asyncio.run(main())
    assert len(readers) == 1 and len(readers[0]) <= MAX_CALLS, readers
    assert sent[0]["status"] == 200 and sent[-1]["body"] == b"data: [DONE]\n\n"


def test_ids_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def recorded(work: Callable[..., Any]) -> Callable[..., Any]:
        def note(ids: Any, *arguments: Any, **named: Any) -> Any:
            seen.append(ids)
            return work(ids, *arguments, **named)

        return note

    def checked(spec: RequestSpec, *arguments: Any) -> Any:
        seen.append(spec.prompt_token_ids)
        return check_request(spec, *arguments)

    async def main() -> None:
        request = FakeRequest(STREAMED)
        running = asyncio.create_task(request.run())
        await run_loop()
        assert len(request.link.keys) == 2
        await request.update(finish_reason=FinishReason.LENGTH)
        await running

    monkeypatch.setattr(client_module, "check_request", checked)
    monkeypatch.setattr(schema, "prompt_list", recorded(schema.prompt_list))
    asyncio.run(main())
    assert sorted(map(str, seen)) == ["((5, 6), (7, 8))", "(5, 6)", "(7, 8)"]


@pytest.mark.parametrize(
    ("scope", "answers"),
    [
        ({"type": "http", "method": "POST", "path": "/llm/v1/x"}, "endpoint"),
        ({"type": "http", "method": "GET", "path": "/llm/v1/x"}, "router"),
        ({"type": "http", "method": "POST", "path": "/v1/x"}, "router"),
    ],
)
def test_exact_paths_bypass_the_router(scope: Scope, answers: str) -> None:
    called: list[str] = []

    def app(name: str) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            called.append(name)

        return answer

    known = ExactPaths({("POST", "/llm/v1/x"): app("endpoint")}, app("router"))
    asyncio.run(cast("Any", known(scope, cast("Any", None), cast("Any", None))))
    assert called == [answers]


def test_the_garbage_collector_skips_objects_from_before_the_first_request() -> None:
    link = FakeLink()
    made = [[number] for number in range(10_001)]  # the tests' own are frozen before

    async def main() -> int:
        service = Service(ServerConfig(served_model_name=("m",)), EventLog())
        async with serve.loaded(EngineConfig(model="m"), lambda _: link, service):
            return gc.get_freeze_count()

    before = gc.get_freeze_count()
    try:
        assert asyncio.run(main()) > before + len(made)
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("name", ["m", 'a "choices":[] b', "\\", 'é\n"'])
def test_an_envelope_changes_no_byte(name: str) -> None:
    choice = CompletionChunkChoice(index=3, text='say "choices":[]')
    parts: dict[str, Any] = {"id": "x", "created": 1, "model": name, "system_fingerprint": "f"}
    whole = frame(encode(CompletionChunk(**parts, choices=[choice], usage=None)))
    envelope = Envelope(CompletionChunk(**parts, choices=[], usage=None))
    assert envelope.around(choice) == whole
