"""The worker processes of ``pool``: the template process that forks them, and their loop.

A worker receives methods through its pipe and answers each with its result or a ``Failure``. It
ends as soon as the other end of the pipe is closed.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

import jax

from pallas_kernels.lib.device import Device
from pallas_kernels.toolchain.jax_internals import MOSAIC
from pallas_kernels.toolchain.machine_code import described_device


@dataclass(frozen=True)
class Failure:
    """Why a method failed."""

    reason: str
    trace: str  # the worker's traceback


def serve(descriptors: Sequence[int], device: Device) -> None:
    """Fork a worker for each pipe, and wait until they have ended. Kernels are for ``device``.

    A process with threads must not fork: the thread that watches a pipe is started in the worker,
    and numpy's OpenBLAS ends its threads at a fork (pthread_atfork). So during the imports, a
    second or two, the exit of the parent process is not noticed.
    """
    jax.config.update("jax_platforms", "cpu")  # the GPU's memory belongs to the parent process
    importlib.import_module(MOSAIC)
    if device.platform == "gpu":
        with suppress(NotImplementedError):  # without XLA for GPUs kernels can only be lowered
            described_device(device)
    gc.disable()  # a worker compiles a few kernels and exits
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
    """Answer requests until this process is killed or the parent exits."""
    requests = SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        answer = _call(requests.get())
        try:
            connection.send(answer)
        except OSError:  # the parent has exited
            return


def _receive(connection: Connection, requests: SimpleQueue[bytes]) -> None:
    """Queue requests; exits the process when the parent exits, even during a compilation."""
    while True:
        try:
            requests.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _call(pickled: bytes) -> bytes | Failure:
    try:
        return pickle.loads(pickled)()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
