"""Several hosts with one engine: they compare plans, share executables, and wait for each other."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import NoReturn

import msgspec

from jaxinfer.core.errors import EngineError
from jaxinfer.core.hosts import Peer, Reply, watch
from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import prepare_folder, write_trusted
from jaxinfer.engine.start.join import Joined
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.build import compile_missing
from jaxinfer.exec.compile.bundle import StoredExecutable, checked_content, load_kernel_compiler
from jaxinfer.exec.compile.fingerprint import Fingerprint
from jaxinfer.exec.compile.store import Store
from jaxinfer.exec.run.device_memory import check_host


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """The executables of host 0."""

    executables: dict[str, StoredExecutable]


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The content of a file of an executable."""

    content: bytes


class Missing(msgspec.Struct, frozen=True, array_like=True):
    """The names of those that another host does not have."""

    names: list[str]


def described(plan: EnginePlan) -> dict[str, dict[str, str]]:
    """Facts that must be alike on all hosts: executables, weights, and seeds of random ones."""
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
                peer.put(Content(checked_content(store.folder, saved[name])))
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
                write_trusted(store.folder / stored.file, peer.get(Content).content)
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
