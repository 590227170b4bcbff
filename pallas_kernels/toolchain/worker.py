"""The workers of ``pool``: a template process that forks them, and what each of them does.

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

from pallas_kernels.device import Device
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
    and numpy's OpenBLAS ends its own threads before (pthread_atfork). So for the second or two of
    the imports nothing notices that the parent process has gone.
    """
    jax.config.update("jax_platforms", "cpu")  # the GPU's memory belongs to the parent process
    importlib.import_module(MOSAIC)
    if device.platform == "gpu":
        with suppress(NotImplementedError):  # without XLA for GPUs kernels can only be lowered
            described_device(device)
    gc.disable()  # a few kernels; their garbage goes with the process
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
    """Answer requests until this process is ended or the parent has gone."""
    requests = SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:
        answer = _call(requests.get())
        try:
            connection.send(answer)
        except OSError:  # the parent has gone
            return


def _receive(connection: Connection, requests: SimpleQueue[bytes]) -> None:
    """Ends the process with its parent, even while it compiles a kernel."""
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
