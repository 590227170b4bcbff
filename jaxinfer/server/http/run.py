"""The server's life: sockets, TLS, loading behind an open port, and an orderly end.

Owns: uvicorn and the signals. The port is taken before the model is loaded, so that a taken one
fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import NoReturn, Protocol

import uvicorn
from starlette.types import ASGIApp

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.protocol import BoundedHeads

BACKLOG = 2048  # connections that the kernel holds until they are accepted
# Connections that a turn of the loop accepts, of all that wait. uvloop's libuv takes one of each
# socket (libuv/libuv#3696), and a turn in which 200 streams send their tokens takes 10 ms.
ACCEPTED_AT_ONCE = 16
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which proxies drop idle connections
FLUSH_SECONDS = 5.0  # for the last events of streams, to clients that read them
OPEN_FILES = 65536  # one for each connection; the usual soft limit is 1024


class Service(Protocol):
    """What the end of the server asks of the app's service."""

    def begin_drain(self) -> None:
        """Refuse new work, and say so in ``/ready``."""
        ...

    async def drained(self, seconds: float) -> bool:
        """Wait until no request is open; False when some still are after ``seconds``."""
        ...

    def stop_all(self) -> None:
        """End every open request; its handler sends what an ended answer has."""
        ...


type Load = Callable[[], AbstractAsyncContextManager[str]]


def run(
    app: ASGIApp, service: Service, load: Load, config: ServerConfig, say: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; open requests have ``shutdown_timeout`` seconds to end.

    ``load`` is entered once the app listens (which answers 503 itself until then), gives a few
    words about what is served, and is left in the end. ``say`` shows the line that tells of
    readiness. Raises ``ConfigError`` for an address or TLS files that cannot be used, and what
    ``load`` raises. A second signal, and any signal during loading, ends the process at once.
    """
    server = Server(uvicorn_config(config, app))
    asyncio.run(
        _serve(server, service, load, config, say), loop_factory=server.config.get_loop_factory()
    )


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would cut off streams."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen until ``should_exit``; every socket several times over, to accept as many at once.

        uvicorn closes them all, so that nobody is accepted any more once it has been told to end.
        """
        again = [one.dup() for one in sockets or () for _ in range(ACCEPTED_AT_ONCE - 1)]
        await super().serve(None if sockets is None else [*sockets, *again])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours; see ``Signals``."""
        yield

    def drop_connections(self) -> None:
        """Cut off clients that do not read the end of their answer."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


class Signals:
    """SIGTERM and SIGINT: the first asks for an end, the next one is the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: ServerConfig) -> None:
        self.first: asyncio.Future[int] = loop.create_future()
        self._loop = loop
        self._config = config

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._take, number)
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    async def unless_one_comes[T](self, work: Awaitable[T]) -> T:
        """What the work gives; a signal meanwhile is the end, since nobody is served yet."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self.first), return_when="FIRST_COMPLETED")
        if not task.done():
            self._exit(self.first.result())
        return task.result()

    def _take(self, number: int) -> None:
        if self.first.done():
            self._exit(number)
        self.first.set_result(number)

    def _exit(self, number: int) -> NoReturn:
        """End without waiting for threads, with the code that shells give for the signal."""
        _forget_socket_file(self._config)
        os._exit(128 + number)


async def _serve(
    server: Server,
    service: Service,
    load: Load,
    config: ServerConfig,
    say: Callable[[str], None],
) -> None:
    start = time.monotonic()
    # signals first: who can connect may also send one
    with Signals(asyncio.get_running_loop(), config) as signals, bound_sockets(config) as sockets:
        _allow_many_connections()
        address = _address(config, sockets[0])
        listening = asyncio.create_task(server.serve(sockets))
        async with AsyncExitStack() as stack:  # the engine ends after the last answer
            try:
                loading = stack.enter_async_context(load())
                summary = await signals.unless_one_comes(loading)
                say(f"ready on {address} in {time.monotonic() - start:.1f} s ({summary})")
                await asyncio.wait((signals.first, listening), return_when="FIRST_COMPLETED")
                seconds = config.shutdown_timeout
                say(f"shutting down: open requests have {seconds:g} s; a second signal ends them")
                await _drain(service, config.shutdown_timeout)
            finally:
                await _close(server, listening)


async def _drain(service: Service, seconds: float) -> None:
    """Let open requests end by themselves for a while, then end them."""
    service.begin_drain()
    if not await service.drained(seconds):
        service.stop_all()
        await service.drained(FLUSH_SECONDS)


async def _close(server: Server, listening: asyncio.Task[None]) -> None:
    """Stop listening; connections close once their last bytes are sent, or are cut off."""
    server.should_exit = True
    cut = asyncio.get_running_loop().call_later(FLUSH_SECONDS, server.drop_connections)
    try:
        await listening
    finally:
        cut.cancel()


def uvicorn_config(config: ServerConfig, app: ASGIApp) -> uvicorn.Config:
    """uvicorn's settings, checked; raises ``ConfigError`` for TLS files that cannot be used."""
    made = uvicorn.Config(
        app,
        http=BoundedHeads,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        workers=1,  # given, so that uvicorn does not read WEB_CONCURRENCY
        proxy_headers=False,
        server_header=False,
        root_path=config.root_path,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
    )
    try:
        made.load()
    except (OSError, ssl.SSLError) as error:
        files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        names = ", ".join(name for name in files if name)
        raise ConfigError(f"TLS cannot be set up from {names}: {error}") from error
    return made


@contextlib.contextmanager
def bound_sockets(config: ServerConfig) -> Iterator[list[socket.socket]]:
    """The sockets that the settings ask for; nothing is left of them afterwards.

    Raises ``ConfigError`` when an address cannot be had.
    """
    sockets = [_unix_socket(Path(config.uds))] if config.uds else _tcp_sockets(config)
    try:
        yield sockets
    finally:
        for bound in sockets:
            bound.close()
        _forget_socket_file(config)


def _tcp_sockets(config: ServerConfig) -> list[socket.socket]:
    """One socket for each address of the host; as with vLLM, no host is every IPv4 interface."""
    host, port = config.host or "0.0.0.0", config.port
    sockets: list[socket.socket] = []
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, name in dict.fromkeys((entry[0], str(entry[4][0])) for entry in known):
            made = socket.create_server(
                (name, port),
                family=family,
                backlog=BACKLOG,
                dualstack_ipv6=name == "::" and socket.has_dualstack_ipv6(),
            )
            sockets.append(made)
            port = made.getsockname()[1]
    except OSError as error:
        for made in sockets:
            made.close()
        raise ConfigError(_why_unbound(host, port, error)) from error
    return sockets


def _why_unbound(host: str, port: int, error: OSError) -> str:
    match error:
        case OSError(errno=errno.EADDRINUSE):
            return f"port {port} is in use; stop the program that has it, or choose another --port"
        case OSError(errno=errno.EACCES):
            return f"port {port} is reserved for the system; choose a --port above 1023"
        case _:
            return f"the server cannot listen on {host}, port {port}: {error.strerror}"


def _unix_socket(path: Path) -> socket.socket:
    """A socket at ``path``, in place of one that a dead server left behind."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            _remove_if_abandoned(path)
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise ConfigError(f"the server cannot listen on the socket {path}: {error}") from error
    except ConfigError:
        made.close()
        raise
    return made


def _remove_if_abandoned(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path} exists and is no socket; choose another --uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise ConfigError(f"the socket {path} is in use; stop the program that has it")


def _forget_socket_file(config: ServerConfig) -> None:
    if config.uds:
        Path(config.uds).unlink(missing_ok=True)


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _address(config: ServerConfig, bound: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    host, port = bound.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"
