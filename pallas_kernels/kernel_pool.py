"""Kernels in Mosaic made side by side, in processes of their own.

To lower one is Python, which a process does with one core. To compile one takes a turn at LLVM,
whose options are a process's, and XLA wants others (``machine_code``).

Owns: ``KernelPool`` and its processes. Must not know: kernels, what they are made of.
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

from pallas_kernels.device import Device
from pallas_kernels.kernel_worker import Failure

# Not multiprocessing's way to start one: it would run the caller's script again.
PROGRAM = """
import json, sys
descriptors, device, *sys.path = sys.argv[1:]
from pallas_kernels.device import Device
from pallas_kernels.kernel_worker import serve
serve(json.loads(descriptors), Device(**json.loads(device)))
"""


class KernelError(RuntimeError):
    """A kernel could not be made in its process."""


class KernelPool:
    """Processes that lower or compile a kernel each, for a device that they need not see; as a
    context manager it ends them.

    One is started, which imports what all need and then becomes all of them: an import takes 2 s of
    a core of an H200's host, and twelve at once had its 16 cores busy for as long.
    """

    def __init__(self, size: int, device: Device) -> None:
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        pipes = [Pipe() for _ in range(size)]
        theirs = [end.fileno() for _, end in pipes]
        arguments = (theirs, asdict(device))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(json.dumps, arguments), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # which is the caller's; troubles go to stderr
                pass_fds=theirs,
                process_group=0,  # Ctrl-C is for the caller, who then closes the pool
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
        """What a method of something that can be pickled returns in the next process that is idle;
        as many threads as there are processes may call this, and more wait.

        Raises ``KernelError``, with the name of whose method it is, for what was raised there, or
        when the process died.
        """
        end = self._idle.get()
        try:
            end.send_bytes(pickle.dumps(method))
            answer = end.recv()
        except (EOFError, OSError):
            raise KernelError(
                f"{method.__self__}: the process that makes it has died; see what it wrote to "
                "stderr, and whether the host has memory left"
            ) from None
        finally:
            self._idle.put(end)
        if isinstance(answer, Failure):
            error = KernelError(f"{method.__self__} could not be made: {answer.reason}")
            error.add_note(answer.trace)
            raise error
        return answer

    def close(self) -> None:
        """End the processes, whatever they are at; whoever waits for one gets ``KernelError``."""
        if self._process.returncode is None:  # else the group's number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
