"""The HTTP app on a real socket, in a thread of the test process.

Owns: ``serving``. The test passes the engine, which runs on its own thread as with
``--disable-frontend-multiprocessing``, so that the test can inspect it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.link.client import EngineClient
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.replicas import Replicas
from jaxinfer.engine.link.thread import EngineThread
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.server.http.buffered import BufferedBytes
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.http.run import Server, bound_sockets, uvicorn_config
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.routes.app import create_app
from jaxinfer.server.service.rendering import Renderer
from jaxinfer.server.service.service import Service
from jaxinfer.text.render_process import RenderRequest, rendered

SECONDS = 30.0  # after which a test stops waiting


class LocalRenderer(Renderer):
    """Renders in this process, which saves the start of another one (0.2 s)."""

    async def render(self, request: RenderRequest, *, is_own: bool, client: str = "") -> str:
        del is_own, client
        return rendered(request).prompt()


@dataclass
class Serving:
    """A running server."""

    url: str
    port: int
    engine: Engine
    service: Service
    loop: asyncio.AbstractEventLoop
    listener: Server

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self.listener.server_state.connections)

    def num_tasks(self) -> int:
        """Tasks of the server's loop that have not ended."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(SECONDS)

    @property
    def buffered(self) -> BufferedBytes:
        """The count of bytes that no handler has read."""
        made: Any = self.listener.config.http
        return made.keywords["limits"].buffered

    def client(self, **options: Any) -> httpx.Client:
        """A client of the server; it reads no certificates, which would take 30 ms."""
        return httpx.Client(
            base_url=self.url, timeout=SECONDS, trust_env=False, verify=False, **options
        )

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """POST the fields as JSON."""
        with self.client() as client:
            return client.post(path, json=fields)

    def wait_until_idle(self) -> None:
        """Return once no request is open and every page is free; fail after a timeout."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if not (self.engine.has_work or stats.num_live_pages or self.service.client.num_open):
                return
            time.sleep(0.005)
        raise AssertionError(f"still busy: {self.engine.stats()}")


@contextmanager
def serving(
    engine: Engine,
    *others: Engine,
    send_buffer: int | None = None,
    renderer: Renderer | None = None,
    **settings: Any,
) -> Iterator[Serving]:
    """Serve ``engine`` on a free local port; the settings are those of ServerConfig.

    ``others``: replicas, which share its requests.
    ``send_buffer``: bytes that the kernel buffers of each response, instead of its default.
    ``renderer``: of chats, instead of one in this process.
    """
    config = ServerConfig(host="127.0.0.1", port=0, **settings)
    started = threading.Event()
    found: list[Serving] = []
    failure: list[BaseException] = []

    async def main() -> None:
        service = Service(config, EventLog(), renderer or LocalRenderer())
        link: Link = EngineThread(engine)
        if others:
            link = Replicas(link, 1 + len(others), lambda rank: EngineThread(others[rank - 1]))
        metrics = Metrics(engine.facts.name, engine.limits, start=link.start_stats)
        client = EngineClient(link, metrics.observe)
        service.attach(client, metrics)
        with bound_sockets(config) as sockets:
            if send_buffer is not None:
                sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            server = Server(uvicorn_config(config, create_app(service)))
            port = sockets[0].getsockname()[1]
            loop = asyncio.get_running_loop()
            listening = asyncio.create_task(server.serve(sockets))
            url = f"http://127.0.0.1:{port}"
            found.append(Serving(url, port, engine, service, loop, server))
            stop.append(lambda: loop.call_soon_threadsafe(setattr, server, "should_exit", True))
            started.set()
            await listening
            await service.renderer.close()
            await client.shutdown()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # the test's thread raises it
            failure.append(error)
            started.set()

    stop: list[Any] = []
    thread = threading.Thread(target=run, name="test-server", daemon=True)
    thread.start()
    started.wait(SECONDS)
    if failure:
        raise failure[0]
    try:
        yield found[0]
    finally:
        stop[0]()
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server did not stop"
        if failure:
            raise failure[0]
