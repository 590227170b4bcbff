"""Answers of an engine in this process, through the app that ``jaxinfer serve`` serves.

So an answer is the same as a server's: its template, its parser of calls and thoughts, its fields.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.cli.chat.events import Event, failure, read_events, request_body
from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from jaxinfer.core.config import EngineConfig
    from jaxinfer.core.server_config import ServerConfig
    from jaxinfer.engine.link.link import Link

    type Start = Callable[[EngineConfig], Link]

STOP_SECONDS = 10.0  # for the engine to end


class _Running(NamedTuple):
    """The app and its loop, which runs on a thread."""

    app: ASGIApp
    loop: asyncio.AbstractEventLoop
    stopped: asyncio.Event
    max_model_len: int


class LocalAnswerer:
    """See ``Answerer``."""

    where = "the engine"

    def __init__(self, running: _Running, model: str) -> None:
        self.model = model
        self.max_model_len: int | None = running.max_model_len
        self._app, self._loop = running.app, running.loop

    def answer(self, request: Mapping[str, Any]) -> Generator[Event]:
        """See ``Answerer``."""
        from jaxinfer.server.routes.direct import call_app

        body = request_body(self.model, request)
        messages: SimpleQueue[Message | None] = SimpleQueue()

        async def send(message: Message) -> None:
            messages.put(message)

        async def call() -> None:
            try:
                await call_app(self._app, "POST", "/v1/chat/completions", body, send)
            finally:
                messages.put(None)

        answering = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            start = messages.get()
            if start is None:
                answering.result()
                return
            pieces = _bodies(messages)
            if start["status"] != 200:
                raise failure(self.where, start["status"], {}, b"".join(pieces))
            yield from read_events(pieces, self.where)
        finally:
            answering.cancel()


def _bodies(messages: SimpleQueue[Message | None]) -> Generator[bytes]:
    while (message := messages.get()) is not None:
        yield message.get("body", b"")


@contextmanager
def local_answerer(
    engine_config: EngineConfig, server_config: ServerConfig, start: Start
) -> Generator[LocalAnswerer]:
    """An engine from ``start`` and its app, which end with the block."""
    ready = Future[_Running]()
    # Ctrl-C in the start ends the program at once, so the thread must not keep it alive
    thread = threading.Thread(
        target=_run, args=(engine_config, server_config, start, ready), daemon=True
    )
    thread.start()
    running = ready.result()
    try:
        yield LocalAnswerer(running, server_config.served_model_name[0])
    finally:
        running.loop.call_soon_threadsafe(running.stopped.set)
        thread.join(STOP_SECONDS)


def _run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    start: Start,
    ready: Future[_Running],
) -> None:
    try:
        asyncio.run(_serve(engine_config, server_config, start, ready))
    except BaseException as error:
        if ready.done():  # the conversation has seen why
            return
        ready.set_exception(error)


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    start: Start,
    ready: Future[_Running],
) -> None:
    from jaxinfer.cli.serve import loaded
    from jaxinfer.core.log import LogSettings
    from jaxinfer.server.http.log import EventLog, configure_logging
    from jaxinfer.server.routes.app import create_app
    from jaxinfer.server.service.service import Service

    configure_logging(sys.stderr, LogSettings(level="error"))
    service = Service(server_config, EventLog())
    async with loaded(engine_config, start, service):
        if not service.has_chats:
            raise ConfigError(
                "this model has no chat template; give one with --chat-template, or use "
                "`jaxinfer generate`"
            )
        stopped = asyncio.Event()
        limits = service.client.limits
        app, loop = create_app(service), asyncio.get_running_loop()
        ready.set_result(_Running(app, loop, stopped, limits.max_model_len))
        await stopped.wait()
