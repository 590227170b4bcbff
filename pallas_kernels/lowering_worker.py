"""The process that lowers kernels for another one, started by ``lowering_pool``.

Owns: what it does with its end of the pipe: it answers each ``Kernel`` with its module, or with a
``Failure``, and ends as soon as the other end is closed. Imports nothing that takes long before it
watches for that. Must not know: how it was started, GPUs.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import ModuleType


@dataclass(frozen=True)
class Failure:
    """Why a kernel could not be lowered."""

    reason: str
    trace: str  # of the calls in the worker


def serve(descriptor: int) -> None:
    """Answer what comes over the pipe, until this process is ended or the other one has gone."""
    connection, kernels = Connection(descriptor), SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(connection, kernels), daemon=True).start()
    _hide_plugins()
    import jax

    jax.config.update("jax_platforms", "cpu")  # a GPU's memory belongs to the other process
    gc.disable()  # a few kernels; what they leave is gone with the process
    while True:
        answer = _lowered(kernels.get())
        try:
            connection.send(answer)
        except OSError:  # the other process has gone
            return


def _receive(connection: Connection, kernels: SimpleQueue[bytes]) -> None:
    """Ends the process with the other one, even in the middle of a kernel."""
    while True:
        try:
            kernels.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _hide_plugins() -> None:
    """JAX would load all plugins, a GPU's with its driver's libraries, to lower for a CPU alone.

    It looks for them in a package of this name and among entry points.
    """
    package = ModuleType("jax_plugins")
    package.__path__ = []
    sys.modules[package.__name__] = package
    for point in entry_points(group=package.__name__):
        plugin = ModuleType(point.value)
        plugin.initialize = lambda: None  # type: ignore[attr-defined]
        sys.modules[point.value] = plugin


def _lowered(pickled: bytes) -> bytes | Failure:
    try:
        return pickle.loads(pickled).lower()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
