"""Several hosts with one engine: they connect, agree on a plan, and share executables."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

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
    watch,
)
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import prepare_folder, write_trusted
from jaxinfer.exec.compile.build import compile_missing
from jaxinfer.exec.compile.bundle import StoredExecutable, checked_content, load_kernel_compiler
from jaxinfer.exec.compile.fingerprint import Fingerprint, differences
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import check_host

if TYPE_CHECKING:
    from jaxinfer.engine.start.plan import EnginePlan

SHUTDOWN_SECONDS = 5  # in which all hosts end, after the last message
# sums of several CPUs over sockets; and no handler of SIGTERM, with which a process would not end
JAX_SETTINGS = (
    ("jax_cpu_collectives_implementation", "gloo"),
    ("jax_enable_preemption_service", False),
)


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """The executables of host 0."""

    executables: dict[str, StoredExecutable]


class Missing(msgspec.Struct, frozen=True, array_like=True):
    """The names of those that another host does not have."""

    names: list[str]


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


def described(plan: EnginePlan) -> dict[str, dict[str, str]]:
    """What has to be alike on all hosts: executables, weights, and seeds of random ones."""
    sizes = (f"{file.name}:{file.stat().st_size}" for file in plan.source.files)
    weights = {
        "weight files": hashlib.sha256("\n".join(sorted(sizes)).encode()).hexdigest(),
        "load_format": plan.config.load_format,
        "seed": str(plan.config.seed or 0),
    }
    return {**msgspec.to_builtins(Fingerprint.of(plan.program)), "weights": weights}


def share_executables(plan: EnginePlan, progress: Progress) -> None:
    """Bring the executables of host 0 into the caches of all hosts; it compiles missing ones.

    XLA chooses kernels by trying them, so two hosts that compile could compute different bits.
    Raises a ``JaxinferError``.
    """
    joined, store = plan.joined, plan.store
    assert joined is not None, "there are several hosts"
    if joined.hosts.rank == 0:
        check_host(plan.memory)
        load_kernel_compiler()
        prepare_folder(store.folder.parent, store.cache)
        compile_missing(store, plan.program.names(), progress)
        saved = store.saved()
        for peer in joined.peers:
            peer.put(Saved(saved))
        for peer in joined.peers:
            for name in peer.get(Missing).names:
                peer.send(checked_content(store.folder, saved[name]))
        return
    peer = joined.peers[0]
    needed = peer.get(Saved).executables
    missing = [name for name, one in needed.items() if store.saved().get(name) != one]
    _take(peer, store, {name: needed[name] for name in missing})


def _take(peer: Peer, store: Store, missing: dict[str, StoredExecutable]) -> None:
    peer.put(Missing([*missing]))
    if missing:
        prepare_folder(store.folder.parent, store.cache)
        with store.adding():
            for name, stored in missing.items():
                write_trusted(store.folder / stored.file, bytes(peer.receive()))
                store.add(name, stored)


def wait_for_others(joined: Joined) -> None:
    """Wait until the other hosts have loaded their parts, and watch them from now on.

    Raises ``EngineError`` if one could not load them.
    """
    for peer in joined.peers:
        if reason := peer.get(Reply).error:
            raise EngineError(f"{peer.name}: {reason}")
    for peer in joined.peers:
        watch(peer, partial(_failed, peer.name))


def _failed(name: str, message: bytearray) -> NoReturn:
    """A host sends nothing but the reason why it ends."""
    raise EngineError(f"{name}: {msgspec.msgpack.decode(message, type=Reply).error}")
