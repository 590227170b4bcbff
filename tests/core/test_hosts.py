"""The connections between hosts: hosts that do not fit, do not come, or end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from jaxinfer import EngineConfig
from jaxinfer.core import hosts as own
from jaxinfer.core.errors import ConfigError, EngineError
from jaxinfer.core.hosts import Hello, Hosts, Peer, Reply, accept, connect, watch
from jaxinfer.core.version import VERSION
from kit.hosts import free_ports

TWO: dict[str, Any] = {"num_hosts": 2, "tensor_parallel_size": 2, "coordinator": "127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_rank": 2}, "host_rank is 2, and the last of 2 hosts is 1"),
        ({"coordinator": None}, "num_hosts is 2, and there is no coordinator; give HOST:PORT"),
        ({"num_hosts": 1}, "coordinator is for several hosts; give num_hosts"),
        ({"coordinator": "127.0.0.1"}, "coordinator must be HOST:PORT with a port below 65535"),
        ({"coordinator": "a:65535"}, "coordinator must be HOST:PORT with a port below 65535"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, and 2 hosts have equally many"),
        ({"tensor_parallel_size": None}, "tensor_parallel_size is 1, and 2 hosts"),
        ({"bundle": "x"}, "a bundle is of one host; leave it out, or num_hosts"),
        ({"num_hosts": 0}, "num_hosts must be at least 1, got 0"),
        ({"host_rank": -1}, "host_rank must be at least 0, got -1"),
        ({"hosts_timeout": 0}, r"hosts_timeout must be a number in \(0, 3600\]"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**TWO | changes)


def test_the_addresses_of_hosts() -> None:
    assert EngineConfig().hosts is None
    hosts = EngineConfig(**TWO | {"coordinator": "[::1]:9000", "host_rank": 1}).hosts
    assert hosts == Hosts(2, 1, "::1", 9000, 60.0)
    assert hosts.of_jax == "[::1]:9001"


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every connection after the test."""
    made: list[Peer] = []
    begin = Peer.__init__

    def recorded(self: Peer, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Peer, "__init__", recorded)
    yield
    for peer in made:
        peer.leave()


def connected(port: int) -> socket.socket:
    """A connection to host 0, which may not listen yet."""
    for _ in range(500):
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        time.sleep(0.01)
    raise AssertionError("host 0 does not listen")


def running[T](function: Callable[[], T]) -> Future[T]:
    """The future of a call on another thread."""
    made = Future[T]()

    def run() -> None:
        try:
            made.set_result(function())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return made


def some(count: int, rank: int, port: int, timeout: float = 5.0) -> Hosts:
    return Hosts(count, rank, "127.0.0.1", port, timeout)


def test_hosts_connect_in_any_order() -> None:
    port = free_ports()
    others = [running(lambda rank=rank: connect(some(3, rank, port))) for rank in (2, 1)]
    found = accept(some(3, 0, port))
    for peer, other in zip(found, reversed(others), strict=True):
        peer.send(b"content")
        assert other.result(5).receive() == b"content"
    assert [peer.name for peer in found] == ["host 1 (127.0.0.1)", "host 2 (127.0.0.1)"]


def test_a_coordinator_that_does_not_answer() -> None:
    port = free_ports()
    with pytest.raises(
        EngineError,
        match=rf"host 0 does not answer at 127.0.0.1:{port} within 0.2 s \(Connection refused\)",
    ):
        connect(some(2, 1, port, 0.2))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request", b"\x03\0\0\0abc", None])
def test_a_coordinator_that_is_another_program(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    monkeypatch.setattr(own, "HELLO_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        host = running(lambda: connect(some(2, 1, port, 0.2)))
        with server.accept()[0] as end:
            if answer is not None:
                end.sendall(answer)
                end.shutdown(socket.SHUT_WR)
            with pytest.raises(EngineError, match=r"within 0.3 s \(it has ended, or another progr"):
                host.result(5)


def test_a_host_that_does_not_come() -> None:
    port = free_ports()
    other = running(lambda: connect(some(4, 2, port)))
    message = rf"of 4 hosts 1, 3 did not connect to 127.0.0.1:{port} within 1 s; start the same"
    with pytest.raises(EngineError, match=message):
        accept(some(4, 0, port, 1))
    with pytest.raises(EngineError, match=rf"host 0 \(127.0.0.1\): {message}"):
        other.result(5)


@pytest.mark.parametrize(
    ("count", "version", "message"),
    [
        (3, VERSION, "its num_hosts is 3 and that of host 0 2"),
        (2, "0.0.1", "it has jaxinfer 0.0.1 and host 0 "),
    ],
)
def test_a_host_that_does_not_fit(count: int, version: str, message: str) -> None:
    port = free_ports()
    first = running(lambda: accept(some(2, 0, port)))
    peer = Peer(connected(port), "host 0")
    peer.put(Hello(version, 1, count))
    message = rf"host 1 \(127.0.0.1\): {message}"
    with pytest.raises(EngineError, match=message):
        first.result(5)
    with pytest.raises(EngineError, match=message.partition(": ")[2]):
        peer.get(Hello)


def test_a_rank_that_is_taken() -> None:
    port = free_ports()
    first = running(lambda: accept(some(3, 0, port)))
    others = [running(lambda: connect(some(3, 1, port))) for _ in range(2)]
    for one in (first, *others):
        with pytest.raises(EngineError, match="its host_rank 1 is taken already"):
            one.result(5)


def test_a_connection_of_another_program_is_passed_over() -> None:
    port = free_ports()
    first = running(lambda: accept(some(2, 0, port)))
    with connected(port) as end:  # host 0 listens until the other host is there
        end.sendall(b"\x03\0\0\0GET")
    other = running(lambda: connect(some(2, 1, port)))
    assert len(first.result(5)) == 1 and other.result(5).name == "host 0 (127.0.0.1)"


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match=r"host 0 cannot listen at 192.0.2.1:9001 .*next one are"):
        accept(Hosts(2, 0, "192.0.2.1", 9000, 1.0))


def test_a_host_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Future[str]()
    monkeypatch.setattr(own, "end_process", lambda error: ended.set_result(str(error)))
    one, two = (Peer(end, name) for end, name in zip(pair(), ("host 1", "host 0"), strict=True))
    taken: list[bytes] = []
    watch(one, taken.append)
    two.send(b"call")
    two.leave()
    assert ended.result(5) == "host 1 has ended; its log has the reason; start all hosts again"
    assert taken == [b"call"]
    with pytest.raises(EngineError, match="host 1 has ended"):
        for _ in range(100):
            one.send(b"more")


def test_hosts_that_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "end_process", lambda error: pytest.fail(str(error)))
    one, two = (Peer(end, name) for end, name in zip(pair(), ("host 0", "host 1"), strict=True))
    taken = Future[bytes]()
    watch(one, taken.set_result)
    two.finish()
    assert taken.result(5) == b""
    one.leave()


def test_a_reason_is_told() -> None:
    one, two = (Peer(end, name) for end, name in zip(pair(), ("host 0", "host 1"), strict=True))
    two.refuse("no memory")
    with pytest.raises(EngineError, match="host 0: no memory"):
        one.get(Hello)
    two.put(Reply())
    assert one.get(Reply) == Reply()
    two.finish()
    with pytest.raises(EngineError, match="host 0 has ended"):
        one.get(Reply)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), timeout=5)
        return one, server.accept()[0]
