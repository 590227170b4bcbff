"""Kernels lowered side by side, in processes of their own: lowering is Python, which one process
does with one core.

Owns: ``LoweringPool`` and its processes. Must not know: kernels, what their modules are for.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Self

from pallas_kernels.lowered import Kernel
from pallas_kernels.lowering_worker import Failure

# Not multiprocessing's way to start one: it would run the caller's script again.
PROGRAM = """
import sys
descriptor, *sys.path = sys.argv[1:]
from pallas_kernels.lowering_worker import serve
serve(int(descriptor))
"""
DYING_SECONDS = 10  # of a process that has closed its pipe


class LoweringError(RuntimeError):
    """A kernel could not be lowered in its process."""


class LoweringPool:
    """Processes that lower a kernel each; as a context manager it ends them."""

    def __init__(self, size: int) -> None:
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        try:
            for _ in range(size):
                self._workers.append(_Worker())
                self._idle.put(self._workers[-1])
        except BaseException:
            self.close()
            raise

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
        worker = self._idle.get()
        try:
            return worker.lower(kernel)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes, whatever they are at; whoever waits for one gets ``LoweringError``."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()


class _Worker:
    """One process and our end of the pipe to it. It ends when that is closed."""

    def __init__(self) -> None:
        self._end, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # which is the caller's; troubles go to stderr
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the caller, who then closes the pool
            )

    def lower(self, kernel: Kernel) -> bytes:
        request = pickle.dumps(kernel)
        try:
            self._end.send_bytes(request)
            answer = self._end.recv()
        except (EOFError, OSError):
            status = self._process.wait(DYING_SECONDS)
            raise LoweringError(
                f"{kernel}: the process that lowers it has ended with status {status}"
            ) from None
        if isinstance(answer, Failure):
            error = LoweringError(f"{kernel} could not be lowered: {answer.reason}")
            error.add_note(answer.trace)
            raise error
        return answer

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    def wait(self) -> None:
        self._process.wait()
