"""The process that becomes those that make kernels for another one, started by ``kernel_pool``.

Owns: what each does with its end of a pipe: it answers each method with what that returns, or a
``Failure``, and ends as soon as the other end is closed. Must not know: who started them.
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
from pallas_kernels.machine_code import described_device

MOSAIC = "jax.experimental.pallas.mosaic_gpu"


@dataclass(frozen=True)
class Failure:
    """Why a kernel could not be made."""

    reason: str
    trace: str  # of the calls in the worker


def serve(descriptors: Sequence[int], device: Device) -> None:
    """Become a process for each pipe, and wait for their ends. Kernels are for ``device``.

    A process with threads must not be copied: what watches a pipe is begun in the copies, and
    numpy's OpenBLAS ends its own threads before (pthread_atfork). So it is only noticed after the
    imports, a second or two, when who started this one is gone.
    """
    jax.config.update("jax_platforms", "cpu")  # a GPU's memory belongs to the other process
    importlib.import_module(MOSAIC)
    if device.platform == "gpu":
        with suppress(NotImplementedError):  # without XLA for GPUs kernels can be lowered alone
            described_device(device)
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
    asked = SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(connection, asked), daemon=True).start()
    while True:
        answer = _made(asked.get())
        try:
            connection.send(answer)
        except OSError:  # the other process has gone
            return


def _receive(connection: Connection, asked: SimpleQueue[bytes]) -> None:
    """Ends the process with the other one, even in the middle of a kernel."""
    while True:
        try:
            asked.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _made(pickled: bytes) -> bytes | Failure:
    try:
        return pickle.loads(pickled)()
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
