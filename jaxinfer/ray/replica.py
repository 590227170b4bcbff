"""``Replica``: an engine and the app of ``jaxinfer serve`` in an actor of Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

from starlette.types import Message

from jaxinfer.cli.serve import engine_start, loaded, log_settings
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.ray.forwarded import Forwarded
from jaxinfer.ray.settings import configs
from jaxinfer.server.http.log import EventLog, configure_logging
from jaxinfer.server.http.run import FLUSH_SECONDS
from jaxinfer.server.routes.app import create_app
from jaxinfer.server.routes.status import check_engine
from jaxinfer.server.service.service import Service

SENDING_SECONDS = 0.5  # in which Ray sends the last messages of a process that is about to end
MAX_UNREAD = 64  # messages of an answer that the ingress has not taken; then its stream is slower


class Answering:
    """Runs requests that come as ``Forwarded`` in the app of a server."""

    def __init__(self, service: Service, name: str) -> None:
        self.service, self.name = service, name
        self._app = create_app(service)

    async def answer(self, request: Forwarded) -> AsyncIterator[list[Message]]:
        """The messages of the app's answer, as many at a time as there are.

        If the caller stops reading, the app sees that its client has disconnected. Raises
        ``EngineError`` for a request that is not answered since the engine has ended.
        """
        unread: asyncio.Queue[Message | None] = asyncio.Queue(MAX_UNREAD)
        gone = asyncio.Event()
        body = [request.body]

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**request.scope}, receive, send)
            finally:
                if not gone.is_set():
                    await unread.put(None)

        async def send(message: Message) -> None:
            if gone.is_set():
                raise OSError("the client has gone")  # as ASGI servers say it
            await unread.put(message)

        running = asyncio.ensure_future(run())
        try:
            more = True
            while more:
                messages = await _next(unread)
                more = messages[-1] is not None
                self._check_answered(messages[0])
                yield [one for one in messages if one is not None]
            await running
        finally:
            gone.set()
            while not unread.empty():  # so that the app gets on
                unread.get_nowait()
            with suppress(OSError):
                await running

    async def whole_answer(self, request: Forwarded) -> tuple[str, list[Message]]:
        """The name of this replica, and all messages of the answer."""
        return self.name, [one async for messages in self.answer(request) for one in messages]

    def _check_answered(self, first: Message | None) -> None:
        """Raise ``EngineError`` if this is the head of an error that says that the engine ended."""
        failed = first is not None and first.get("status", 0) >= 500
        if failed and not self.service.client.alive:
            raise EngineError("the engine of this replica has ended")

    async def check_health(self) -> None:
        """Raise if the engine hangs or has ended; Ray calls it and starts another replica."""
        await check_engine(self.service)


class Replica(Answering):
    """A replica of the model; ``settings`` are those of ``jaxinfer serve``.

    It is ready once the engine is. The engine's process sees the GPUs that Ray gives this one.
    """

    async def __init__(self, settings: Mapping[str, Any]) -> None:
        from ray import serve  # pyright: ignore[reportMissingImports]

        engine_config, server_config = configs(settings)
        log = log_settings(server_config)
        configure_logging(sys.stderr, log)
        events = EventLog(
            requests=server_config.enable_log_requests, max_characters=server_config.max_log_len
        )
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(Service(server_config, events), name)
        async with AsyncExitStack() as stack:
            start = stack.enter_context(engine_start(engine_config, server_config))
            model = loaded(engine_config, start, self.service)
            served = await stack.enter_async_context(model)
            self._opened = stack.pop_all()
        self._watch = asyncio.ensure_future(self._end_with(served.ended))

    async def __del__(self) -> None:
        """End the engine; Ray calls it once no request is open."""
        if hasattr(self, "_opened"):
            self._watch.cancel()
            await self._opened.aclose()

    async def _end_with(self, ended: asyncio.Future[JaxinferError]) -> None:
        """End this process once its engine has ended: Ray then sends no requests here."""
        await ended
        await self.service.drain(FLUSH_SECONDS)
        await asyncio.sleep(SENDING_SECONDS)
        os._exit(1)


async def _next(unread: asyncio.Queue[Message | None]) -> list[Message | None]:
    """All messages that there are, at least one."""
    messages = [await unread.get()]
    while not unread.empty():
        messages.append(unread.get_nowait())
    return messages
