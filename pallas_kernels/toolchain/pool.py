"""Worker processes that lower and compile Mosaic kernels in parallel.

Lowering is Python code, which uses one core per process. Compiling uses LLVM, whose options are per
process, and XLA needs different ones (``machine_code``).
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from types import MethodType
from typing import Self

from pallas_kernels.lib.device import Device
from pallas_kernels.toolchain.worker import Failure

# multiprocessing's own start would run the caller's script again.
WORKER_SCRIPT = """
import json, sys
descriptors, device, *sys.path = sys.argv[1:]
from pallas_kernels.lib.device import Device
from pallas_kernels.toolchain.worker import serve
serve(json.loads(descriptors), Device(**json.loads(device)))
"""


class KernelError(RuntimeError):
    """A worker could not lower or compile a kernel."""


class KernelPool:
    """Workers that lower or compile one kernel at a time, for a device that they need not have; as
    a context manager it ends them.

    A template process imports JAX once and forks the workers: the import takes 2 s of a core of an
    H200's host, and twelve at once kept its 16 cores busy for as long.
    """

    def __init__(self, size: int, device: Device) -> None:
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        pipes = [Pipe() for _ in range(size)]
        descriptors = [end.fileno() for _, end in pipes]
        arguments = (descriptors, asdict(device))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", WORKER_SCRIPT, *map(json.dumps, arguments), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stdout belongs to the caller; errors go to stderr
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C goes to the caller only, which then closes the pool
            )
        except BaseException:
            for end, _ in pipes:
                end.close()
            raise
        finally:
            for _, end in pipes:
                end.close()
        for end, _ in pipes:
            self._idle.put(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, method: MethodType) -> bytes:
        """Call a method of an object that can be pickled in the next idle worker; returns its
        result. Threads wait while all workers are busy.

        Raises ``KernelError``, which names the object, when the method raises or the worker dies.
        """
        end = self._idle.get()
        try:
            end.send_bytes(pickle.dumps(method))
            answer = end.recv()
        except (EOFError, OSError):
            raise KernelError(
                f"{method.__self__}: its worker process has died; see its messages on "
                "stderr, and whether the host is out of memory"
            ) from None
        finally:
            self._idle.put(end)
        if isinstance(answer, Failure):
            error = KernelError(f"{method.__self__} could not be built: {answer.reason}")
            error.add_note(answer.trace)
            raise error
        return answer

    def close(self) -> None:
        """Kill the workers; threads that wait for one get ``KernelError``."""
        if self._process.returncode is None:  # else the group's number may be in use again
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
