"""Connects the hosts of an engine, and ends all of them if the start of one fails."""

from __future__ import annotations

import atexit
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import jax
import msgspec

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError, EngineError, JaxinferError
from jaxinfer.core.hosts import (
    HostLost,
    Hosts,
    Peer,
    Reply,
    accept,
    connect,
    end_process,
    refused,
)
from jaxinfer.exec.compile.fingerprint import differences

SHUTDOWN_SECONDS = 5  # in which all hosts end, after the last message
# sums of several CPUs over sockets; and no handler of SIGTERM, with which a process would not end
JAX_SETTINGS = (
    ("jax_cpu_collectives_implementation", "gloo"),
    ("jax_enable_preemption_service", False),
)


class _Plan(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a host's plan that have to be those of host 0, in parts."""

    described: dict[str, dict[str, str]]


class Joined:
    """The connections of this host: of host 0 to all others, of another one to host 0."""

    def __init__(self, hosts: Hosts, peers: Sequence[Peer]) -> None:
        self.hosts = hosts
        self.peers = peers

    def send(self, message: bytes) -> None:
        """Send a message of host 0 to the others; raises ``HostLost``."""
        for peer in self.peers:
            peer.send(message)

    def agree(self, described: dict[str, dict[str, str]]) -> None:
        """Raise ``ConfigError`` if the plan of another host differs from that of host 0."""
        if self.hosts.rank:
            self.peers[0].put(_Plan(described))
            if reason := self.peers[0].get(Reply).error:
                raise ConfigError(reason)
            return
        for peer in self.peers:
            theirs = peer.get(_Plan).described
            for part, own in described.items():
                found = differences(theirs.get(part, {}), own, (f"on {peer.name}", "on host 0"))
                if found:
                    raise ConfigError(f"{'; '.join(found.values())}; start all hosts alike")
        for peer in self.peers:
            peer.put(Reply())

    def fail(self, error: JaxinferError) -> None:
        """Tell the other hosts why this one ends."""
        refused(self.peers, str(error))
        if self.hosts.rank == 0:  # JAX would abort hosts that end later
            jax.distributed.shutdown()


@contextmanager
def starting(joined: Joined | None) -> Generator[None]:
    """End the other hosts as well if the start fails within the block."""
    try:
        yield
    except HostLost as error:
        end_process(error)  # JAX would wait for the lost host, and then abort
    except JaxinferError as error:
        if joined is not None:
            joined.fail(error)
        raise


def join(config: EngineConfig) -> Joined | None:
    """Connect the hosts, and their JAX, before its backend starts; None for a single host.

    Raises a ``JaxinferError`` if a host is missing or does not fit.
    """
    if (hosts := config.hosts) is None:
        return None
    if jax.distributed.is_initialized():
        raise ConfigError("a process has one engine of several hosts; start another process")
    joined = Joined(hosts, accept(hosts) if hosts.rank == 0 else [connect(hosts)])
    for name, value in JAX_SETTINGS:
        jax.config.update(name, value)  # pyright: ignore[reportUnknownMemberType]
    try:
        jax.distributed.initialize(
            hosts.of_jax,
            hosts.count,
            hosts.rank,
            initialization_timeout=max(int(hosts.timeout), 1),
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            coordinator_bind_address=hosts.of_jax,
            cluster_detection_method="deactivate",
        )
    except (RuntimeError, ValueError) as error:
        raise EngineError(f"JAX cannot connect the hosts at {hosts.of_jax} ({error})") from error
    for peer in joined.peers:  # before JAX's own function at the exit, which waits for all hosts
        atexit.register(peer.leave if hosts.rank else peer.finish)
    return joined
