"""The server from start to shutdown: sockets, TLS, loading while the port is open, draining.

Owns: uvicorn and the signals. The port is bound before the model is loaded, so that a port in use
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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn, cast

import uvicorn
from starlette.types import ASGIApp

from jaxinfer.core.errors import ConfigError, JaxinferError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.buffered import BufferedBytes
from jaxinfer.server.http.protocol import RESERVED_CONNECTIONS, BoundedHttp, ConnectionLimits

BACKLOG = 2048  # connections that the kernel queues until they are accepted
# Connections accepted per iteration of the event loop. uvloop's libuv accepts one per socket
# (libuv/libuv#3696), and an iteration in which 200 streams send their tokens takes 10 ms.
ACCEPTED_AT_ONCE = 16
KEEP_ALIVE_SECONDS = 75  # longer than the 60 s after which proxies drop idle connections
FLUSH_SECONDS = 5.0  # for the last events of streams, to clients that still read
OPEN_FILES = 65536  # one for each connection; the usual soft limit is 1024
# browsers do not open the addresses that stand for every interface
LOOPBACK: Mapping[str, str] = MappingProxyType({"0.0.0.0": "127.0.0.1", "::": "::1"})
RESERVED_FILES = 128 + RESERVED_CONNECTIONS  # for all else that is open


# refuses new requests, and ends those that are still open after some seconds
type Drain = Callable[[float], Awaitable[None]]


class Served(NamedTuple):
    """A loaded model."""

    summary: str  # for the ready line
    ended: asyncio.Future[JaxinferError]  # why its engine answers no more, once it does not


type Load = Callable[[], AbstractAsyncContextManager[Served]]


def run(
    app: ASGIApp,
    drain: Drain,
    load: Load,
    config: ServerConfig,
    report: Callable[[str], None],
    reload: Callable[[], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; open requests have ``shutdown_timeout`` seconds to end.

    ``load`` is entered once the app listens (the app responds 503 until the model is loaded), and
    exited at the end. ``report`` prints the ready line. ``reload`` is called on SIGHUP. Raises
    ``ConfigError`` for an address or TLS files that cannot be used, the exceptions of ``load``, and
    the error of an engine that has ended, once its requests have been told. A second SIGTERM or
    SIGINT, and any of them during loading, ends the process at once.
    """
    config = replace(config, max_connections=_possible_connections(config))
    server = Server(uvicorn_config(config, app))
    asyncio.run(
        _serve(server, drain, load, config, report, reload),
        loop_factory=server.config.get_loop_factory(),
    )


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would cut off streams."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen until ``should_exit``.

        Duplicates of each socket let one iteration accept several connections. uvicorn closes them
        all, so no connection is accepted after it was told to exit.
        """
        duplicates = [one.dup() for one in sockets or () for _ in range(ACCEPTED_AT_ONCE - 1)]
        await super().serve(None if sockets is None else [*sockets, *duplicates])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing; ``Signals`` handles them."""
        yield

    def drop_connections(self) -> None:
        """Abort connections whose clients do not read the end of their response."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]


class Signals:
    """SIGTERM and SIGINT: the first one starts the shutdown, the second ends the process.

    SIGHUP calls ``reload``; without one it keeps its default, which ends the process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: ServerConfig,
        reload: Callable[[], None] | None = None,
    ) -> None:
        self.first: asyncio.Future[int] = loop.create_future()
        self._loop = loop
        self._config = config
        self._handlers: dict[int, Callable[[], None]] = {
            number: partial(self._on_signal, number) for number in (signal.SIGTERM, signal.SIGINT)
        }
        if reload is not None:
            self._handlers[signal.SIGHUP] = reload

    def __enter__(self) -> Signals:
        for number, handler in self._handlers.items():
            self._loop.add_signal_handler(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number in self._handlers:
            self._loop.remove_signal_handler(number)

    async def run_unless_signalled[T](self, work: Awaitable[T]) -> T:
        """The result of ``work``; a signal before it ends the process: no request is open yet."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self.first), return_when="FIRST_COMPLETED")
        if not task.done():
            self._exit(self.first.result())
        return task.result()

    def _on_signal(self, number: int) -> None:
        if self.first.done():
            self._exit(number)
        self.first.set_result(number)

    def _exit(self, number: int) -> NoReturn:
        """Exit without waiting for threads, with the shell's exit code for the signal."""
        _remove_socket_file(self._config)
        os._exit(128 + number)


async def _serve(
    server: Server,
    drain: Drain,
    load: Load,
    config: ServerConfig,
    report: Callable[[str], None],
    reload: Callable[[], None] | None,
) -> None:
    start = time.monotonic()
    # signals first: once the port is open, a signal can arrive
    loop = asyncio.get_running_loop()
    with Signals(loop, config, reload) as signals, bound_sockets(config) as sockets:
        address = shown_address(config, sockets[0])
        listening = asyncio.create_task(server.serve(sockets))
        async with AsyncExitStack() as stack:  # the engine is closed after the last response
            try:
                loading = stack.enter_async_context(load())
                served = await signals.run_unless_signalled(loading)
                report(f"ready on {address} in {time.monotonic() - start:.1f} s ({served.summary})")
                ends = (signals.first, listening, served.ended)
                await asyncio.wait(ends, return_when="FIRST_COMPLETED")
                failure = served.ended.result() if served.ended.done() else None
                seconds = config.shutdown_timeout if failure is None else FLUSH_SECONDS
                why = "shutting down" if failure is None else "the engine has ended"
                report(f"{why}: open requests have {seconds:g} s; a second signal ends them")
                await drain(seconds)
            finally:
                await _close(server, listening)
        report("ended")
    if failure is not None:
        raise failure


async def _close(server: Server, listening: asyncio.Task[None]) -> None:
    """Stop listening; connections close after their last bytes, or after ``FLUSH_SECONDS``."""
    server.should_exit = True
    done, _ = await asyncio.wait((listening,), timeout=FLUSH_SECONDS)
    if not done:
        server.drop_connections()
    await listening


def uvicorn_config(config: ServerConfig, app: ASGIApp) -> uvicorn.Config:
    """uvicorn's settings, checked; raises ``ConfigError`` for TLS files that cannot be used."""
    limits = ConnectionLimits(BufferedBytes(config.max_buffered_bytes), config.max_connections)
    made = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(BoundedHttp, limits=limits)),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        workers=1,  # set explicitly, so that uvicorn does not read WEB_CONCURRENCY
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=config.trusted_proxies,
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
    """The sockets that the settings name; they are closed and removed at exit.

    Raises ``ConfigError`` if an address cannot be bound.
    """
    sockets = [_bind_unix_socket(Path(config.uds))] if config.uds else _bind_tcp_sockets(config)
    try:
        yield sockets
    finally:
        for bound in sockets:
            bound.close()
        _remove_socket_file(config)


def _bind_tcp_sockets(config: ServerConfig) -> list[socket.socket]:
    """One socket for each address of the host."""
    host, port = config.host, config.port
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, name in dict.fromkeys((entry[0], str(entry[4][0])) for entry in addresses):
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
        raise ConfigError(_bind_error(host, port, error)) from error
    return sockets


def _bind_error(host: str, port: int, error: OSError) -> str:
    match error:
        case OSError(errno=errno.EADDRINUSE):
            return f"port {port} is in use; stop the program that has it, or choose another --port"
        case OSError(errno=errno.EACCES):
            return f"port {port} is reserved for the system; choose a --port above 1023"
        case _:
            return f"the server cannot listen on {host}, port {port}: {error.strerror}"


def _bind_unix_socket(path: Path) -> socket.socket:
    """A socket at ``path``; replaces the file that a stopped server left."""
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


def _remove_socket_file(config: ServerConfig) -> None:
    if config.uds:
        Path(config.uds).unlink(missing_ok=True)


def _possible_connections(config: ServerConfig) -> int:
    """The limit of connections, or fewer if the system allows too few open files for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    if soft < OPEN_FILES:
        soft = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(min(config.max_connections, soft - RESERVED_FILES), 1)


def shown_address(config: ServerConfig, bound: socket.socket) -> str:
    """The URL for programs on this machine."""
    if config.uds:
        return f"unix:{config.uds}"
    host, port = bound.getsockname()[:2]
    host = LOOPBACK.get(host, host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"
