"""Several hosts with one engine: they join, agree on a plan, share executables, and follow host 0.

Host 0 schedules, and its process answers. The others load their devices' parts of the weights and
make the calls that host 0 sends (``exec.run.follow``), until it ends.
"""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import jax
import msgspec

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError, EngineError, JaxinferError
from jaxinfer.core.hosts import Hosts, Peer, Reply, accept, connect, end_process, refused, watch
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.core.staging import prepare_folder, write_trusted
from jaxinfer.exec.compile.build import compile_missing
from jaxinfer.exec.compile.bundle import StoredExecutable, checked_content, load_kernel_compiler
from jaxinfer.exec.compile.fingerprint import Fingerprint, differences
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import check_host
from jaxinfer.exec.run.follow import Follower

if TYPE_CHECKING:
    from jaxinfer.engine.start.plan import EnginePlan

SHUTDOWN_SECONDS = 5  # in which all hosts end, after the last message


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
        """Send a message of host 0 to the others; raises ``EngineError`` if one has ended."""
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
                    reason = "; ".join(found.values())
                    raise refused(self.peers, f"{reason}; start all hosts alike")
        for peer in self.peers:
            peer.put(Reply())


def join(config: EngineConfig) -> Joined | None:
    """Connect the hosts, and their JAX, before its backend starts; None for a single host.

    Raises a ``JaxinferError`` if a host is missing or does not fit.
    """
    if (hosts := config.hosts) is None:
        return None
    if jax.distributed.is_initialized():
        raise ConfigError("a process has one engine of several hosts; start another process")
    joined = Joined(hosts, accept(hosts) if hosts.rank == 0 else [connect(hosts)])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it ignores SIGTERM
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
    if hosts.rank == 0:  # before JAX's own function at the exit, which waits for all hosts
        for peer in joined.peers:
            atexit.register(peer.finish)
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
            raise refused(joined.peers, f"{peer.name}: {reason}")
    for peer in joined.peers:
        watch(peer, partial(_failed, peer.name))


def _failed(name: str, message: bytearray) -> NoReturn:
    """A host sends nothing but the reason why it ends."""
    raise EngineError(f"{name}: {msgspec.msgpack.decode(message, type=Reply).error}")


def follow(config: EngineConfig, progress: Progress = NO_PROGRESS) -> None:
    """Be a host other than 0 of an engine, until host 0 ends. Raises a ``JaxinferError``."""
    from jaxinfer.engine.start.build import plan_engine
    from jaxinfer.engine.start.loading import load

    with progress.phase("the engine starts"):
        plan = replace(plan_engine(config, progress), tokenizer_spec=None)
        assert plan.joined is not None, "there are several hosts"
        (peer,) = plan.joined.peers
        try:
            share_executables(plan, progress)
            loaded = load(plan, progress)
        except JaxinferError as error:
            peer.refuse(str(error))
            raise
        (executables, _), (state, _) = loaded.executables, loaded.state
        follower = Follower(plan.program, executables.by_name, *state)
        peer.put(Reply())
    messages = SimpleQueue[bytearray]()
    watch(peer, messages.put)
    try:
        while message := messages.get():
            follower.run(message)
    except Exception as error:
        reason = EngineError(f"a call of host 0 failed here ({type(error).__name__}: {error})")
        peer.refuse(str(reason))
        end_process(reason)
