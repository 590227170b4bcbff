"""Kernels lowered side by side, in processes of their own: lowering is Python, which one process
does with one core.

Owns: ``LoweringPool`` and its processes. Must not know: kernels, what their modules are for.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Self

from pallas_kernels.lowered import Kernel
from pallas_kernels.lowering_worker import Failure

# Not multiprocessing's way to start one: it would run the caller's script again.
PROGRAM = """
import sys
descriptors, *sys.path = sys.argv[1:]
from pallas_kernels.lowering_worker import serve
serve([int(each) for each in descriptors.split(",")])
"""


class LoweringError(RuntimeError):
    """A kernel could not be lowered in its process."""


class LoweringPool:
    """Processes that lower a kernel each; as a context manager it ends them.

    One is started, which imports what all need and then becomes all of them: an import takes 2 s of
    a core of an H200's host, and twelve at once had its 16 cores busy for as long.
    """

    def __init__(self, size: int) -> None:
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        pipes = [Pipe() for _ in range(size)]
        theirs = [end.fileno() for _, end in pipes]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, ",".join(map(str, theirs)), *sys.path],
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

    def lower(self, kernel: Kernel) -> bytes:
        """``Kernel.lower`` in the next process that is idle; as many threads as there are processes
        may call this, and more wait.

        Raises ``LoweringError``, with the kernel's name, for what was raised there, or when the
        process died.
        """
        end = self._idle.get()
        try:
            end.send_bytes(pickle.dumps(kernel))
            answer = end.recv()
        except (EOFError, OSError):
            raise LoweringError(
                f"{kernel}: the process that lowers it has died; see what it wrote to stderr, and "
                "whether the host has memory left"
            ) from None
        finally:
            self._idle.put(end)
        if isinstance(answer, Failure):
            error = LoweringError(f"{kernel} could not be lowered: {answer.reason}")
            error.add_note(answer.trace)
            raise error
        return answer

    def close(self) -> None:
        """End the processes, whatever they are at; whoever waits for one gets ``LoweringError``."""
        if self._process.returncode is None:  # else the group's number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
