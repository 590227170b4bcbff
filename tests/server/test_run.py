"""The server from start to shutdown, with a small app in its own process: TLS, heads, signals."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.run import uvicorn_config

CERTIFICATE = Path(__file__).parents[1] / "data" / "tls"

PROGRAM = """
import asyncio, contextlib, json, sys
from jaxinfer.cli.main import Commands
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http import protocol, run

class Service:
    def __init__(self):
        self.open, self.stopped, self.draining = 0, asyncio.Event(), False
    async def drain(self, seconds):
        self.draining = True
        for limit in (seconds, run.FLUSH_SECONDS):
            end = asyncio.get_running_loop().time() + limit
            while self.open and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.01)
            self.stopped.set()

service = Service()
ready = False

async def app(scope, receive, send):
    status = 503 if service.draining or not ready else 200
    await send({"type": "http.response.start", "status": status, "headers": []})
    if scope["path"] == "/stream" and status == 200:
        service.open += 1
        count = 1000 if "full" in scope["query_string"].decode() else 1
        for _ in range(int(scope["query_string"].decode().removeprefix("full"))):
            if service.stopped.is_set():
                break
            await send({"type": "http.response.body", "body": b"token " * count, "more_body": True})
            await asyncio.sleep(0.05)
        service.open -= 1
        text = b"aborted" if service.stopped.is_set() else b"done"
        await send({"type": "http.response.body", "body": text})
    else:
        length = sum(len(value) for _, value in scope["headers"])
        await send({"type": "http.response.body", "body": str(length).encode()})

@contextlib.asynccontextmanager
async def load():
    global ready
    await asyncio.sleep(options["load_seconds"])
    if options["fails"]:
        raise ValueError("the model is broken")
    ready = True
    yield run.Served("a dummy", asyncio.get_running_loop().create_future())
    print("engine ended", file=sys.stderr)

options = json.loads(sys.argv[2])
config = ServerConfig(**json.loads(sys.argv[1]))
run.FLUSH_SECONDS = options["flush_seconds"]
protocol.HEAD_SECONDS = options["head_seconds"]
run.run(app, service.drain, load, config, lambda line: print(line, file=sys.stderr, flush=True))
"""


class Server:
    """A running server process."""

    def __init__(self, config: dict[str, Any], options: dict[str, Any]) -> None:
        self.config = config
        known = {"load_seconds": 0.0, "fails": False, "flush_seconds": 5.0}
        known |= {"head_seconds": 30.0} | options
        command = [sys.executable, "-c", PROGRAM, json.dumps(config), json.dumps(known)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    @property
    def stderr(self) -> Any:
        assert self.process.stderr is not None
        return self.process.stderr

    def wait_ready(self) -> str:
        line = self.stderr.readline()
        assert "ready on" in line, line + self.stderr.read()
        return line

    def end(self) -> tuple[int, str]:
        """Exit code and the output since the last read."""
        _, told = self.process.communicate(timeout=20)
        return self.process.returncode, told


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    """Starts a server process with these settings; all are killed at the end."""
    started: list[Server] = []

    def start(config: dict[str, Any], **options: Any) -> Server:
        started.append(Server(config, options))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


def free_address() -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return {"host": "127.0.0.1", "port": probe.getsockname()[1]}


@pytest.fixture
def local() -> dict[str, Any]:
    return free_address()


def connect(config: dict[str, Any]) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection((config["host"], config["port"]), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise AssertionError("nobody listens")


def exchange(client: socket.socket, *parts: bytes) -> bytes:
    """The server's response to these bytes, until it closes the connection."""
    with client:
        try:
            for part in parts:
                client.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        said = b""
        try:
            while part := client.recv(65536):
                said += part
        except ConnectionResetError:
            pass
        return said


# sockets and TLS


def test_a_unix_socket_is_served_and_removed(start: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start({"uds": str(path), "root_path": "/llm"})
    assert f"ready on unix:{path}" in server.wait_ready()
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport) as client:
        assert client.get("http://localhost/health").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert not path.exists()


def test_tls(start: Callable[..., Server], local: dict[str, Any]) -> None:
    files = {"ssl_certfile": "certificate.pem", "ssl_keyfile": "key.pem"}
    files = {name: str(CERTIFICATE / file) for name, file in files.items()}
    server = start(local | files)
    assert f"ready on https://127.0.0.1:{local['port']}" in server.wait_ready()
    trusting = ssl.create_default_context(cafile=files["ssl_certfile"])
    url = f"https://127.0.0.1:{local['port']}/health"
    assert httpx.get(url, verify=trusting).status_code == 200


BROKEN_TLS = {
    "missing": ("none.pem", "key.pem"),
    "swapped": ("key.pem", "certificate.pem"),
    "no key": ("certificate.pem", "certificate.pem"),
}


@pytest.mark.parametrize(("certificate", "key"), BROKEN_TLS.values(), ids=BROKEN_TLS)
def test_broken_tls_files(certificate: str, key: str) -> None:
    config = ServerConfig(
        ssl_certfile=str(CERTIFICATE / certificate), ssl_keyfile=str(CERTIFICATE / key)
    )
    with pytest.raises(ConfigError, match=f"TLS cannot be set up from .*{certificate}"):
        uvicorn_config(config, lambda scope, receive, send: None)  # type: ignore[arg-type]


# heads of requests


@pytest.fixture(scope="module")
def serving() -> Iterator[dict[str, Any]]:
    """The address of a server that accepts heads up to 8 KiB."""
    config = free_address() | {"h11_max_incomplete_event_size": 8192}
    server = Server(config, {})
    server.wait_ready()
    yield config
    server.process.kill()
    server.process.communicate()


GET = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
OVERSIZED = {
    "long header": (GET + b"a: " + b"x" * 10_000 + b"\r\n\r\n",),
    "endless header": (GET + b"a: ", *[b"x" * 1000] * 50),
    "endless name": (GET, *[b"x" * 1000] * 50),
    "many headers": (GET + b"a: b\r\n" * 2000 + b"\r\n",),
    "endless headers": (GET, *[b"a: b\r\n" * 100] * 50),
    "long URL": (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",),
    "endless URL": (b"GET /", *[b"x" * 1000] * 50),
    "endless trailer": (
        b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: ",
        *[b"x" * 1000] * 50,
    ),
}


@pytest.mark.parametrize("parts", OVERSIZED.values(), ids=OVERSIZED)
def test_oversized_heads(serving: dict[str, Any], parts: tuple[bytes, ...]) -> None:
    said = exchange(connect(serving), *parts)
    if parts[0].startswith(b"GET") and len(parts) == 1:  # read whole, so nothing is lost
        assert said.startswith(b"HTTP/1.1 431 ")
        assert json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "head_too_large"
    else:
        assert b"431" in said[:200] or said == b"" or parts[0].startswith(b"POST")


FITTING = {
    "head of 7 KB": (GET + b"a: " + b"x" * 7000 + b"\r\n\r\n",),
    "in small pieces": tuple(bytes([one]) for one in GET + b"\r\n"),
    "body of 1 MB": (
        b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 1000000\r\n\r\n",
        b"x" * 1_000_000,
    ),
    "1,000 chunks": (
        b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        *[b"10\r\n" + b"x" * 16 + b"\r\n"] * 1000,
        b"0\r\n\r\n",
    ),
    "pipelined": (GET.replace(b"connection: close\r\n", b"\r\n") * 300 + GET + b"\r\n",),
}


@pytest.mark.parametrize("parts", FITTING.values(), ids=FITTING)
def test_fitting_heads(serving: dict[str, Any], parts: tuple[bytes, ...]) -> None:
    assert exchange(connect(serving), *parts).startswith(b"HTTP/1.1 200 ")


def test_a_slow_head_is_dropped_and_an_idle_connection_is_not(
    start: Callable[..., Server], local: dict[str, Any]
) -> None:
    start(local, head_seconds=0.3).wait_ready()
    with connect(local) as patient:
        patient.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert patient.recv(9) == b"HTTP/1.1 "
        for begun in ("", "GET /health HTTP/1.1\r\nhost: "):
            start_time = time.monotonic()
            assert exchange(connect(local), begun.encode()) == b""
            assert 0.2 < time.monotonic() - start_time < 3
        patient.sendall(GET + b"\r\n")
        assert exchange(patient).count(b"HTTP/1.1 200 ") == 1


def test_bytes_that_are_not_http(serving: dict[str, Any]) -> None:
    said = exchange(connect(serving), b"\x16\x03\x01 hello\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400 ")
    assert json.loads(said.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


# shutdown


def stream(config: dict[str, Any], query: str) -> socket.socket:
    client = connect(config)
    client.sendall(f"GET /stream?{query} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert client.recv(10)
    return client


def rest(client: socket.socket) -> bytes:
    return exchange(client)


def test_loading_is_answered_and_a_failure_ends_it(
    start: Callable[..., Server], local: dict[str, Any]
) -> None:
    server = start(local, load_seconds=1.0, fails=True)
    assert exchange(connect(local), GET + b"\r\n").startswith(b"HTTP/1.1 503 ")
    code, told = server.end()
    assert code == 1
    assert told.endswith("ValueError: the model is broken\n")


def test_a_signal_while_loading_ends_at_once(
    start: Callable[..., Server], local: dict[str, Any]
) -> None:
    server = start(local, load_seconds=60.0)
    connect(local).close()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_open_requests_end_by_themselves(
    start: Callable[..., Server], local: dict[str, Any], number: int
) -> None:
    server = start(local | {"shutdown_timeout": 10})
    server.wait_ready()
    client = stream(local, "20")
    os.kill(server.process.pid, number)
    assert "open requests have 10 s" in server.stderr.readline()
    assert exchange(connect(local), GET + b"\r\n").startswith(b"HTTP/1.1 503 ")
    said = rest(client)
    assert said.count(b"token") == 20
    assert b"done" in said
    assert said.endswith(b"0\r\n\r\n")
    code, told = server.end()
    assert (code, told) == (0, "engine ended\nended\n")


def test_after_the_timeout_they_are_ended_properly(
    start: Callable[..., Server], local: dict[str, Any]
) -> None:
    server = start(local | {"shutdown_timeout": 0.2})
    server.wait_ready()
    clients = [stream(local, "10000") for _ in range(32)]
    server.process.terminate()
    for client in clients:
        said = rest(client)
        assert b"aborted" in said
        assert said.endswith(b"0\r\n\r\n")
    assert server.end()[0] == 0


def test_a_client_that_does_not_read_is_disconnected(
    start: Callable[..., Server], local: dict[str, Any]
) -> None:
    server = start(local | {"shutdown_timeout": 0.2}, flush_seconds=0.5)
    server.wait_ready()
    client = stream(local, "full10000000")
    time.sleep(1.0)
    began = time.monotonic()
    server.process.terminate()
    assert server.end()[0] == 0
    assert time.monotonic() - began < 5
    client.close()


def test_the_second_signal_ends_at_once(
    start: Callable[..., Server], local: dict[str, Any]
) -> None:
    server = start(local)
    server.wait_ready()
    client = stream(local, "10000")
    server.process.send_signal(signal.SIGINT)
    assert "shutting down" in server.stderr.readline()
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (128 + signal.SIGINT, "")
    client.close()
