"""Sockets between the hosts of one engine: host 0 has one to each other host.

Messages are frames (``core.frames``). They are neither encrypted nor authenticated, and host 0
sends executables: use a network in which every machine is trusted.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from jaxinfer.core.errors import ConfigError, EngineError, JaxinferError
from jaxinfer.core.frames import read_frame, send_frame
from jaxinfer.core.version import VERSION

LOGGER = "jaxinfer.hosts"
RETRY_SECONDS = 0.1  # from one attempt to connect to the next
HELLO_SECONDS = 5.0  # for the first message of a connection
# A machine without power or network is taken for lost after IDLE + COUNT * INTERVAL seconds.
IDLE_SECONDS, INTERVAL_SECONDS, COUNT = 1, 1, 3
LAST_PORT = 65535


class HostLost(EngineError):
    """Another host has ended."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of an engine, and the place of this one among them."""

    count: int
    rank: int
    address: str  # at which host 0 listens; JAX's coordinator is at the next port
    port: int
    timeout: float  # seconds in which all hosts have to start

    @property
    def coordinator(self) -> str:
        """The address as the user gave it."""
        return f"{self.address}:{self.port}"

    @property
    def of_jax(self) -> str:
        """The address of JAX's coordinator."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port + 1}"


def checked_hosts(
    count: int, rank: int, coordinator: str | None, timeout: float, devices: int
) -> Hosts | None:
    """The hosts of an engine on so many devices, of all hosts; None for a single host.

    Raises ``ConfigError`` for numbers that do not fit.
    """
    if rank >= count:
        raise ConfigError(f"host_rank is {rank}, and the last of {count} hosts is {count - 1}")
    if count == 1:
        if coordinator is not None:
            raise ConfigError("coordinator is for several hosts; give num_hosts, or leave it out")
        return None
    if coordinator is None:
        raise ConfigError(
            f"num_hosts is {count}, and there is no coordinator; give HOST:PORT of host 0"
        )
    address, _, port = coordinator.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < LAST_PORT:
        raise ConfigError(
            f"coordinator must be HOST:PORT with a port below {LAST_PORT}, got {coordinator!r}"
        )
    if devices % count:
        raise ConfigError(
            f"tensor_parallel_size is {devices}, and {count} hosts have equally many devices; "
            f"give a multiple of {count}"
        )
    return Hosts(count, rank, address.strip("[]"), int(port), timeout)


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a host to host 0."""

    version: str
    rank: int
    count: int  # of hosts


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """An answer; ``error`` is the reason for a refusal, or empty."""

    error: str = ""


class Peer:
    """A connection to another host. ``name`` is in messages: "host 1 (10.0.0.2)"."""

    def __init__(self, end: socket.socket, name: str) -> None:
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, COUNT)
        waited = 1000 * (IDLE_SECONDS + COUNT * INTERVAL_SECONDS)  # for data that was sent
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, waited)
        self._end = end
        self.name = name
        self.is_finished = False  # whether this host has said that it ends

    @property
    def lost(self) -> HostLost:
        """The error of a host that has ended."""
        return HostLost(f"{self.name} has ended; its log has the reason; start all hosts again")

    def send(self, message: bytes) -> None:
        """Send a message; raises ``HostLost``."""
        try:
            send_frame(self._end, message)
        except OSError as error:
            raise self.lost from error

    def receive(self) -> bytearray:
        """The next message; raises ``HostLost``."""
        if (message := read_frame(self._end)) is None:
            raise self.lost
        return message

    def put(self, message: msgspec.Struct) -> None:
        """Send a record."""
        self.send(msgspec.msgpack.encode(message))

    def get[T](self, kind: type[T]) -> T:
        """The next record, which is of this type. Raises ``EngineError`` with the other host's
        reason if it ends, or ``HostLost``.
        """
        if not (message := self.receive()):
            raise self.lost
        with suppress(msgspec.ValidationError):
            return msgspec.msgpack.decode(message, type=kind)
        reply = msgspec.msgpack.decode(message, type=Reply)
        raise EngineError(f"{self.name}: {reply.error}")

    def refuse(self, reason: str) -> None:
        """Send the reason why this host ends."""
        with suppress(EngineError):
            self.put(Reply(reason))

    def finish(self) -> None:
        """Send the last message, which is empty: both hosts end."""
        self.is_finished = True
        with suppress(EngineError):
            self.send(b"")

    def leave(self) -> None:
        """Close the connection: this host ends, perhaps before the other one."""
        self.is_finished = True
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # also for a thread that receives
        self._end.close()


def connect(hosts: Hosts) -> Peer:
    """The connection of a host other than 0 to host 0.

    Raises ``EngineError`` if host 0 does not answer in time, or refuses this host.
    """
    end, deadline, reason = None, time.monotonic() + hosts.timeout, ""
    while end is None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise EngineError(
                f"host 0 does not answer at {hosts.coordinator} within {hosts.timeout:g} s "
                f"({reason or 'no answer'}); start host 0, or correct --coordinator"
            )
        try:
            end = socket.create_connection((hosts.address, hosts.port), timeout=left)
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(RETRY_SECONDS, max(left, 0)))
    peer = Peer(end, f"host 0 ({hosts.address})")
    try:
        end.settimeout(hosts.timeout + HELLO_SECONDS)  # host 0 waits for the other hosts
        peer.put(Hello(VERSION, hosts.rank, hosts.count))
        if reason := peer.get(Reply).error:
            raise EngineError(f"{peer.name}: {reason}")
        end.settimeout(None)
    except (HostLost, msgspec.DecodeError) as error:
        peer.leave()
        raise EngineError(
            f"host 0 does not answer at {hosts.coordinator} within "
            f"{hosts.timeout + HELLO_SECONDS:g} s (it has ended, or another program listens "
            "there); see its log, or correct --coordinator"
        ) from error
    except EngineError:
        peer.leave()
        raise
    return peer


def accept(hosts: Hosts) -> list[Peer]:
    """The connections of host 0 to the other hosts, in the order of their ranks.

    Raises ``EngineError`` if one does not connect in time, or does not fit.
    """
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + hosts.timeout
    _listener(hosts, hosts.port + 1).close()  # JAX opens it itself, and would not say if it cannot
    with _listener(hosts, hosts.port) as listener:
        while len(found) < hosts.count - 1:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                end, (address, *_) = listener.accept()
            except TimeoutError:
                missing = [str(i) for i in range(1, hosts.count) if i not in found]
                reason = (
                    f"of {hosts.count} hosts {', '.join(missing)} did not connect to "
                    f"{hosts.coordinator} within {hosts.timeout:g} s; start the same command there "
                    "with its --host-rank"
                )
                raise refused(found.values(), reason) from None
            end.settimeout(HELLO_SECONDS)
            try:
                hello = msgspec.msgpack.decode(read_frame(end) or b"", type=Hello)
            except msgspec.DecodeError:  # no host of ours
                end.close()
                continue
            peer = Peer(end, f"host {hello.rank} ({address})")
            if reason := _misfit(hello, hosts, found):
                refused([peer], reason)
                raise refused(found.values(), f"{peer.name}: {reason}")
            found[hello.rank] = peer
    peers = [found[rank] for rank in sorted(found)]
    for peer in peers:
        peer.put(Reply())
    return peers


def _listener(hosts: Hosts, port: int) -> socket.socket:
    """A socket at the coordinator's address; raises ``ConfigError`` if it cannot be opened."""
    family = socket.AF_INET6 if ":" in hosts.address else socket.AF_INET
    try:
        return socket.create_server((hosts.address, port), family=family, backlog=hosts.count)
    except OSError as error:
        raise ConfigError(
            f"host 0 cannot listen at {hosts.address}:{port} ({error.strerror or error}); "
            "--coordinator is an address of host 0 whose port and the next one are free"
        ) from error


def _misfit(hello: Hello, hosts: Hosts, found: dict[int, Peer]) -> str:
    """The reason why a host does not fit; empty if it does."""
    if hello.version != VERSION:
        return f"it has jaxinfer {hello.version} and host 0 {VERSION}; install one version on all"
    if hello.count != hosts.count:
        return f"its num_hosts is {hello.count} and that of host 0 {hosts.count}; give one number"
    if hello.rank in found:
        return f"its host_rank {hello.rank} is taken already; give each host its own"
    return ""


def refused(peers: Iterable[Peer], reason: str) -> EngineError:
    """The error of a start that ends, after these hosts were told the reason."""
    for peer in peers:
        peer.refuse(reason)
        peer.leave()
    return EngineError(reason)


def watch(peer: Peer, take: Callable[[bytearray], None]) -> None:
    """Pass messages to ``take`` in a thread, and end this process with 1 if the other host ends
    without a last message, which is empty.

    Calls that wait for the lost host's devices never return, so nothing else can end them.
    """

    def follow() -> None:
        try:
            while message := peer.receive():
                take(message)
            take(message)
        except JaxinferError as error:
            if not peer.is_finished:
                end_process(error)

    threading.Thread(target=follow, name="jaxinfer-hosts", daemon=True).start()


def end_process(error: JaxinferError) -> NoReturn:
    """Log the error and end this process with 1, whatever its other threads wait for."""
    logging.getLogger(LOGGER).error("jaxinfer: error: %s", error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
