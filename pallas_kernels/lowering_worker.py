"""The process that becomes those that lower kernels for another one, started by ``lowering_pool``.

Owns: what each does with its end of a pipe: it answers each ``Kernel`` with its module, or with a
``Failure``, and ends as soon as the other end is closed. Must not know: who started them, GPUs.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import ModuleType

MOSAIC = "jax.experimental.pallas.mosaic_gpu"


@dataclass(frozen=True)
class Failure:
    """Why a kernel could not be lowered."""

    reason: str
    trace: str  # of the calls in the worker


def serve(descriptors: Sequence[int]) -> None:
    """Become a process for each pipe, and wait for their ends.

    A process with threads must not be copied: what watches a pipe is begun in the copies, and
    numpy's OpenBLAS ends its own threads before (pthread_atfork). So it is only noticed after the
    imports, a second or two, when who started this one is gone.
    """
    _hide_plugins()
    import jax

    jax.config.update("jax_platforms", "cpu")  # a GPU's memory belongs to the other process
    importlib.import_module(MOSAIC)
    gc.disable()  # a few kernels; what they leave is gone with the process
    for descriptor in descriptors:
        if os.fork() == 0:
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            _answer(Connection(descriptor))
            os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _answer(connection: Connection) -> None:
    """Until this process is ended or the other one has gone."""
    kernels = SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(connection, kernels), daemon=True).start()
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
