"""Starts the engine's process, which takes seconds until it can do anything.

Owns: ``spawn``, the command and the socket. A module of its own, which imports nothing that takes
long, so that the other process can come first and both import at the same time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

ENGINE_PROGRAM = (sys.executable, "-m", "jaxinfer.engine.link.child")


@dataclass(frozen=True)
class Spawned:
    """A process, and our end of the socket to it. The process ends when that is closed.

    As a context manager it kills the process in the end, unless somebody has ended it before.
    """

    process: subprocess.Popen[bytes]
    end: socket.socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its compilers too
        self.process.wait()


def spawn(program: Sequence[str] = ENGINE_PROGRAM) -> Spawned:
    """Start ``program`` with the number of its socket, and return at once."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,  # Ctrl-C is for the server, which then decides
        )
    return Spawned(process, ours)
